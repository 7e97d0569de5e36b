"""The rooms of the house: their imports, their sizes, their docstrings, and one meaning for each class name."""

import ast
import collections
import pathlib
import re

from paxtrain.config.axes import AXES
from tests import sources
from tests.rooms import BY_STRING, MAY_IMPORT, SHARED
from tests.sources import ROOT

PRODUCT = ("compress", "paxtrain", "planner")
MOST_MODULES = 12


def room(path):
    """Return the room of a file, whose imports the table has: its package and the first folder in it."""
    return "/".join(pathlib.PurePosixPath(path).parts[:-1][:2])


def between_rooms(found):
    """Return the imports between rooms; mains may import all."""
    shared = {f"{package}/__init__.py" for package in PRODUCT} | SHARED
    pairs = [(path, other) for path, source in found.items() for other in source.imports - shared if not source.is_main]
    inner = [(a, b) for a, b in pairs if {a.partition("/")[0], b.partition("/")[0]} <= set(PRODUCT)]
    return [(a, b) for a, b in inner if room(a) != room(b)]


def trespasses(found):
    """Return the imports between rooms that the table does not allow."""
    return sorted((a, b) for a, b in between_rooms(found) if room(b) not in MAY_IMPORT[room(a)])


def test_rooms_import_what_the_table_allows():
    found = dict(sources.project())
    assert trespasses(found) == []
    wrong = found["paxtrain/model/transformer.py"]
    imports = wrong.imports | {"paxtrain/parallel/step.py"}
    found["paxtrain/model/transformer.py"] = sources.Source(wrong.is_main, imports, wrong.distributions)
    assert trespasses(found) == [("paxtrain/model/transformer.py", "paxtrain/parallel/step.py")]


def test_the_table_allows_no_more():
    pairs = {(room(a), room(b)) for a, b in between_rooms(sources.project())}
    assert {(name, other) for name, others in MAY_IMPORT.items() for other in others} == pairs


def by_string(tree):
    """Yield the rooms of the modules that `import_module` gets as strings, or as strings that begin with a package."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[name, *_]):
                first = name.values[0] if isinstance(name, ast.JoinedStr) else name
                text = first.value if isinstance(first, ast.Constant) else ""
                if text.partition(".")[0] in PRODUCT:
                    yield "/".join(text.split(".")[:2])


def test_the_table_names_what_is_imported_by_a_string():
    paths = [path for path in sources.project() if path.startswith(PRODUCT)]
    found = {(path, other) for path in paths for other in by_string(ast.parse((ROOT / path).read_text()))}
    between = {(path, other) for path, other in found if room(path) != other}
    assert between == set(BY_STRING.items())
    assert not any(other in MAY_IMPORT[room(path)] for path, other in between)
    calls = {
        'importlib.import_module("paxtrain.huggingface.described").configuration': ["paxtrain/huggingface"],
        'import_module(f"planner.cost.{name}")': ["planner/cost"],
        "importlib.import_module(module)": [],
    }
    assert {call: [*by_string(ast.parse(call))] for call in calls} == calls


def test_every_room_is_in_the_table_and_small():
    files = [path for path in sources.project() if path.startswith(PRODUCT) and not path.endswith("__init__.py")]
    assert {room(path) for path in files} == set(MAY_IMPORT)
    folders = collections.Counter(path.rpartition("/")[0] for path in files)  # a room may have folders inside
    assert {name: count for name, count in folders.items() if count > MOST_MODULES} == {}


def definitions(path, tree):
    """Yield names of classes, type aliases and type variables with what each means: a class is like no other."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"class of {path}:{node.lineno}"
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            yield ast.unparse(node.target), ast.unparse(node.value)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, ast.unparse(node.value)
            if re.match("_*[A-Z]", name) and (not name.isupper() or re.match(r"(typing\.)?(TypeVar|NewType)\(", value)):
                yield name, value


def many_meanings(trees):
    """Return the names that have several meanings; those that differ only in leading underscores count as one."""
    found = collections.defaultdict(set)
    for path, tree in trees.items():
        for name, meaning in definitions(path, tree):
            found[name.lstrip("_")].add(meaning)
    return {name: meanings for name, meanings in found.items() if len(meanings) > 1}


def test_a_name_of_a_type_has_one_meaning():
    paths = [path for path in sources.project() if path.startswith(PRODUCT)]
    assert len(paths) > 100
    assert many_meanings({path: ast.parse((ROOT / path).read_text()) for path in paths}) == {}


def test_two_meanings_of_a_name_are_found():
    one = "T = TypeVar('T')\nArray = np.ndarray\nTree: TypeAlias = Any\nclass Step(NamedTuple):\n    x: int\nLIMIT = 3"
    for other, name in {
        "class _Step: pass": "Step",
        "Step = Callable[[int], int]": "Step",
        "Tree: TypeAlias = dict": "Tree",
        "T = TypeVar('T', bound=int)": "T",
        "Array = jax.Array\nLIMIT = 4": "Array",
        "T = TypeVar('T')\nArray = np.ndarray\nTree: TypeAlias = Any": None,
    }.items():
        assert set(many_meanings({"a.py": ast.parse(one), "b.py": ast.parse(other)})) == ({name} if name else set())


def test_the_design_page_lists_every_room():
    """Each between the heading of the house and the next one."""
    house = (ROOT / "docs" / "design.md").read_text().split("\n## ")[1]
    assert {name for name in MAY_IMPORT if f" {name.rpartition('/')[2]}/ " not in house} == set()


def test_the_design_page_lists_rooms_above_those_that_import_them():
    """Except for one, which the page names; rooms of other packages are above anyway."""
    house = (ROOT / "docs" / "design.md").read_text().split("\n## ")[1]
    at = {
        name: house.index(f" {name.rpartition('/')[2]}/ ", house.index(f"    {name.partition('/')[0]}/ "))
        for name in MAY_IMPORT
    }
    inner = [(a, b) for a, others in MAY_IMPORT.items() for b in others if "/" in a and "/" in b]
    same = [(a, b) for a, b in inner if a.partition("/")[0] == b.partition("/")[0]]
    assert len(same) > 100
    assert [(a, b) for a, b in same if at[b] > at[a]] == [("paxtrain/run", "paxtrain/huggingface")]


def test_every_room_says_what_lives_there():
    inside = {path.rpartition("/")[0] for path in sources.project() if path.startswith(PRODUCT)}
    for name in MAY_IMPORT.keys() | inside:
        docstring = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text()))
        assert docstring, name
        modules = {path.stem for path in (ROOT / name).glob("*.py")} - {"__init__", "__main__"}
        # README and docs/design.md list the mains; an architecture's file is all there is of it.
        if name not in ("paxtrain", "planner", "paxtrain/architectures"):
            assert {module for module in modules if f"{module}.py" not in docstring} == set(), name


# What takes names of axes, besides tuples and dicts that name several.
AXIS_TAKERS = {"Group", "Mesh", "PartitionSpec", "Recorder", "Shard", "StageCrossing", "all_gather", "all_to_all"}
AXIS_TAKERS |= {"axis_index", "axis_size", "gather", "own_part", "packed_gather", "packed_scatter", "permute", "pmean"}
AXIS_TAKERS |= {"position", "ppermute", "psum", "psum_scatter", "reduce_scatter"}


def axis_literals(tree):
    """Return the lines on which a string means an axis; the settings of the section mesh only have the same names."""
    found = set()

    def see(*nodes, least=1):
        inner = [part for node in nodes for part in (node.elts if isinstance(node, ast.Tuple | ast.List) else [node])]
        named = [part for part in inner if isinstance(part, ast.Constant) and part.value in AXES]
        found.update(part.lineno for part in named if len({other.value for other in named}) >= least)

    def visit(node, settings=False):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in AXIS_TAKERS:
                see(*node.args, *(keyword.value for keyword in node.keywords))
            case ast.keyword(arg="axis" | "axis_name" | "axes" | "axis_names"):
                see(node.value)
            case ast.Subscript(value=ast.Attribute(attr="shape" | "sizes")):
                see(node.slice)
            case ast.Compare(comparators=[ast.Set(elts=names)]):
                see(*names)
            case ast.Tuple(elts=names) | ast.List(elts=names) | ast.Set(elts=names):
                see(*names, least=2)
            case ast.Constant(value="pipe") if not settings:
                found.add(node.lineno)
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                inner = isinstance(key, ast.Constant) and key.value == "mesh"
                visit(value, inner)
                if key is not None and not settings:
                    visit(key)
            return
        mesh = isinstance(node, ast.keyword) and node.arg == "mesh"
        for child in ast.iter_child_nodes(node):
            visit(child, mesh)

    visit(tree)
    return sorted(found)


# The records themselves; columns of a table; and PyTorch's mesh in a program that has no jax.
MAY_NAME_AXES = ("paxtrain/config/axes.py", "experiments/published/runs.py", "experiments/lab/peer/pytorch.py")


def test_an_axis_is_named_by_its_constant():
    """Except in compress, whose callers give it the axes."""
    paths = [path for path in sources.project() if path.startswith(("paxtrain", "planner", "configs", "experiments"))]
    found = {path: axis_literals(ast.parse((ROOT / path).read_text())) for path in paths if path not in MAY_NAME_AXES}
    assert len(found) > 300
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert axis_literals(ast.parse((ROOT / "paxtrain/config/axes.py").read_text())) != []


def test_a_string_that_means_an_axis_is_found():
    for line in (
        'PartitionSpec(None, ("tensor", "data"))',
        'lax.psum(x, ("data",))',
        'lax.all_gather(x, axis_name="tensor", tiled=True)',
        'jax.vmap(f, axis_name="data")',
        'mesh.shape["tensor"]',
        'config.mesh.sizes["data"]',
        'Shard("data", 4, 0)',
        'Mesh(devices, ("data", "x"))',
        'over == {"tensor"}',
        'order = ("tensor", "data")',
        'sizes = {"data": 2, "pipe": 4}',
        'other != "pipe"',
    ):
        assert axis_literals(ast.parse(line)) == [1], line
    for line in (
        'config = from_dict({"mesh": {"data": 2, "pipe": 2}})',
        'gpt(mesh={"data": 2, "pipe": 4, "tensor": 1})',
        'state.codec["data"]',
        'SCOPES = {"tensor": 1, "sync": 2}',
        "PartitionSpec(DATA, None)",
    ):
        assert axis_literals(ast.parse(line)) == [], line


def unknown_paths(texts):
    """Return the Python files that texts name by their path from the root, and that are not there."""
    named = {path for text in texts for path in re.findall(r"(?<![\w./-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.py\b", text)}
    tops = (*PRODUCT, "configs", "examples", "experiments", "tests")
    return sorted(path for path in named if path.startswith(tops) and not (ROOT / path).exists())


def test_files_that_code_and_pages_name_are_there():
    modules = [(ROOT / path).read_text() for path in sources.project() if path.startswith(PRODUCT)]
    pages = [path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
    assert len(modules) > 100 and len(pages) > 10
    assert unknown_paths([*modules, *pages]) == []
    assert unknown_paths(["see compress/gone.py", "and planner/cost/compute.py"]) == ["compress/gone.py"]
