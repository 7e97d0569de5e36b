"""An axis with a record in AXES, and a field for its size, works.

Here they are data ranks of a host beside those of data, and devices that share the feed-forward part beside those of
tensor.
"""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import paxtrain.model as nn
from paxtrain.config import Config, MeshConfig, ModelConfig, from_dict, to_dict
from paxtrain.config import plan as plans
from paxtrain.config.axes import AXES, CONTEXT, AxisSpec, in_words, layer_sizes
from paxtrain.errors import UserError
from paxtrain.model import parameters
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Parameter, Params, kernel, norm, vocabulary
from paxtrain.parallel.mesh import make_mesh
from planner.cluster.device_sheets import SHEETS
from planner.cost import compute
from planner.cost.candidate import Candidate, host_order
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.export import exported
from planner.memory import closed_form
from planner.placement.place import slots_per_host
from planner.planning import planning, to_plan
from planner.planning.options import PlanOptions
from planner.program.cache import layer_program
from planner.report import text
from planner.search.budget import Budget
from planner.search.enumeration import enumerate_candidates
from planner.search.search import Options, Search
from planner.search.space import Choices
from tests import small
from tests.planner.examples import cluster

NAME = "replica"
REPLICA = AxisSpec(batch=True, sums=lambda mesh, names, dims: True, inside=True)


@dataclasses.dataclass(frozen=True)
class ReplicaMesh(MeshConfig):
    """The section mesh with the new axis."""

    replica: int = 1


def add_axis(monkeypatch, name, record, section):
    monkeypatch.delitem(AXES, CONTEXT)  # the new one is the only one besides data, pipe and tensor
    monkeypatch.setitem(AXES, name, record)
    monkeypatch.setattr(MeshConfig, name, 1, raising=False)
    monkeypatch.setitem(Config.__annotations__, "mesh", section)
    monkeypatch.setitem(plans.Plan.__annotations__, "mesh", section)
    monkeypatch.setitem(plans._SECTIONS, "mesh", section)
    monkeypatch.setattr(to_plan, "MeshConfig", section)


@pytest.fixture
def in_order():
    """Leave the axes behind in their order, which is that of the mesh; a deleted key would come back last."""
    before = dict(AXES)
    yield
    AXES.clear()
    AXES.update(before)


@pytest.fixture
def replica(monkeypatch, in_order):
    add_axis(monkeypatch, NAME, REPLICA, ReplicaMesh)


def config(module="", **mesh):
    model = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8, "module": module}
    return small.config(model=model, mesh=mesh)


def test_without_a_record_there_is_no_such_axis():
    with pytest.raises(UserError, match=r"mesh\.replica"):
        config(replica=2)


def test_its_size_is_checked_and_splits_the_batch(replica):
    c = config(data=2, pipe=2, replica=2)
    assert (c.mesh.devices, c.mesh.ranks, c.rank_micro_batches) == (8, 4, (2, 2, 2, 2))
    assert make_mesh(c.mesh).shape == {"data": 2, "pipe": 2, "tensor": 1, "replica": 2}
    with pytest.raises(UserError, match=r"mesh\.replica must be"):
        config(replica=0)
    with pytest.raises(UserError, match=r"mesh\.data=2 x mesh\.replica=3 x batch\.micro_batch=1"):
        config(data=2, replica=3)


def errors(module="", **mesh):
    """Return the largest errors of loss, norm and gradients on a mesh, over the largest values on one device."""
    found = []
    for c in (config(module), config(module, **mesh)):
        found.append(jax.tree.leaves(small.gradients(small.trainer(c), small.canonical(c.model), small.tokens(c))))
    return [float(np.abs(other - one).max() / np.abs(one).max()) for one, other in zip(*found, strict=True)]


@pytest.mark.once
@pytest.mark.parametrize("shard", ["optimizer", pytest.param("none", marks=pytest.mark.slow)])
def test_its_gradients_are_those_of_one_device(replica, shard):
    assert max(errors(data=2, pipe=2, replica=2, shard=shard)) < 1e-5


def test_a_candidate_with_it_is_seated_told_and_planned(replica):
    """Tensor groups of two replicas share a seat, so a host of 4 has 2 seats."""
    c = Candidate(4, 2, 1, micro_batch=1, micro_batches=2, schedule="1f1b", counts=(1, 1), others=(2,))
    assert (c.seat, c.groups, slots_per_host(c, cluster())) == (2, 8, 2)
    hosts = host_order(c, 4)[0]
    assert hosts.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    order = to_plan.device_order(hosts[::-1], 4, c.sizes)
    assert order == (12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3)
    assert text.mesh(c) == "4 x 2 x 1 replica=2"
    assert in_words(c.sizes) == "data=4 pipe=2 tensor=1 replica=2"
    assert c.figures()["replica"] == 2
    made = to_plan.sections(c, 2, 16, config().compress, np.zeros(2, bool))
    plan = plans.Plan(**made, device_order=order)
    values = plans.to_json(plan)
    assert values["mesh"]["replica"] == 2
    assert plans.from_json(json.loads(json.dumps(values))) == plan
    planned = plan.apply(to_dict(config()))
    assert planned.mesh.sizes == c.sizes
    assert planned.rank_micro_batches == (2,) * 8


def test_axes_for_which_layers_wait_have_devices_side_by_side(replica, monkeypatch):
    """The mesh counts replicas fastest, but devices of a tensor group are neighbors, unless layers wait for both."""
    sizes = {"data": 1, "pipe": 1, "tensor": 2, "replica": 3}
    one = np.zeros((1, 1), int)
    assert to_plan.device_order(one, 6, sizes) == (0, 2, 4, 1, 3, 5)
    monkeypatch.setitem(AXES, NAME, dataclasses.replace(REPLICA, waits="layer"))
    assert to_plan.device_order(one, 6, sizes) == (0, 1, 2, 3, 4, 5)


# Two hosts of four devices; their links are unequal, so that placements differ.
HOSTS, PER_HOST, BATCH = 2, 4, 16
MODEL = ModelConfig(vocab_size=1000, layers=4, hidden=256, heads=4, sequence=128)
CHOICES = Choices(
    schedules=("1f1b",), saves=("dots",), shards=("optimizer",), micro_batch=(1, 2), backward=(), data_ranks=()
)


def search(**changes):
    choices = dataclasses.replace(CHOICES, **changes)
    return Search(cluster(HOSTS, PER_HOST), MODEL, BATCH, choices, Budget(margin=False), Options(uneven=False))


def meshes():
    """Return all meshes (data, pipe, tensor, replica) by trying all sizes."""
    sizes = itertools.product(range(1, 9), repeat=4)
    whole = ((d, p, t, r) for d, p, t, r in sizes if d * p * t * r == 8 and p <= 4 and PER_HOST % (t * r) == 0)
    return {mesh for mesh in whole if 4 % mesh[2] == 0}


def test_the_search_tries_all_its_sizes(replica):
    space = search().space
    columns = [space.column(name).tolist() for name in AXES]
    assert set(zip(*columns)) == meshes()
    assert set(space.column(NAME).tolist()) == {1, 2, 4}
    asked = search(others=((NAME, (2,)),)).space
    assert set(asked.column(NAME).tolist()) == {2}
    ranks = space.data * space.column(NAME)
    assert (space.micro_batches * space.micro_batch * ranks == BATCH).all()


def test_its_largest_size_and_its_dims_limit_the_search(replica, monkeypatch):
    monkeypatch.setitem(AXES, NAME, dataclasses.replace(REPLICA, most=2))
    assert set(search().space.column(NAME).tolist()) == {1, 2}
    monkeypatch.setitem(AXES, NAME, dataclasses.replace(REPLICA, dims=("layers",)))
    three = dataclasses.replace(MODEL, layers=6)
    space = enumerate_candidates(cluster(HOSTS, PER_HOST), three, BATCH, CHOICES)
    assert set(space.column(NAME).tolist()) == {1, 2}


def test_its_sum_is_an_all_reduce_of_shards_inside_a_host(replica, monkeypatch):
    """Two all-reduces' worth of latencies and bytes: 2(R-1) messages of an R-th of the float32 gradients."""
    some = cluster(HOSTS, PER_HOST)
    c = Candidate(1, 2, 1, micro_batch=1, micro_batches=4, schedule="1f1b", counts=(2, 2), others=(4,))
    found = Problem(some, MODEL, c)
    h = MODEL.hidden
    layer = 12 * h * h + 13 * h  # four kernels of 3, 1, 4 and 4 h x h, biases of 3, 1, 4 and 1 h, and two norms
    held = np.array([2 * layer + MODEL.padded_vocab * h] * 2)
    expected = 6 * (3e-6 + held * 4 / 4 / 300e9)
    np.testing.assert_allclose(found.sums, expected)
    hosts = host_order(c, PER_HOST)
    links, kinds = found.links(found.paths(fabric(some), hosts)), found.kind_of_host[hosts]
    summed = found.evaluate(links, kinds).total[0]
    monkeypatch.setattr(found, "sums", np.zeros(2))
    np.testing.assert_allclose(summed - found.evaluate(links, kinds).total[0], expected.max(), rtol=1e-6)
    sharded = Problem(some, MODEL, dataclasses.replace(c, data=2, others=(2,)))
    np.testing.assert_allclose(sharded.sums, 2 * (3e-6 + held / 2 * 4 / 2 / 300e9))


def test_the_search_finds_the_best_of_all_meshes_and_placements(replica):
    some, best = cluster(HOSTS, PER_HOST), {}
    for (data, pipe, tensor, size), micro in itertools.product(meshes(), (1, 2)):
        if BATCH % (data * size * micro):
            continue
        count = BATCH // (data * size * micro)
        c = Candidate(data, pipe, tensor, micro, count, "1f1b", (4 // pipe,) * pipe, others=(size,))
        slots = PER_HOST // (tensor * size)
        first = itertools.combinations(range(2 * slots), slots)  # seats on the first host
        hosts = np.array([[s not in here for s in range(2 * slots)] for here in first], int).reshape(-1, data, pipe)
        seconds = Problem(some, MODEL, c).step(fabric(some), hosts).total.min()
        best[c.sizes[NAME]] = min(best.get(c.sizes[NAME], np.inf), seconds)
    assert set(best) == {1, 2, 4}
    for others, least in ((), min(best.values())), (((NAME, (2,)),), best[2]):
        assert search(others=others).run(top=1, placed=1).ranked[0].seconds == pytest.approx(least, rel=1e-9)


def test_memory_is_that_of_the_parameters_and_of_its_part_of_the_batch(replica):
    """Replicas hold whole parameters, and ZeRO-1 splits states over data alone."""
    one = search()
    sizes = np.array([one.space.column(name) for name in (*AXES, "micro_batch")]).T.tolist()
    two = sizes.index([2, 1, 1, 4, 1])
    parts = closed_form.analytic(one.budget.shape(one.cluster, MODEL, one.space.take(np.array([two]))))
    h, rows = MODEL.hidden, MODEL.padded_vocab
    held = 4 * (12 * h * h + 13 * h) + rows * h + MODEL.sequence * h + 2 * h  # and positions, and the final norm
    assert parts.optimizer == pytest.approx(2 * 4 * held / 2)
    assert parts.gradients == 4 * held
    # Half as many sequences a rank on two devices of one data axis take the same.
    bare = config_of(2, BATCH // 4)
    assert closed_form.analytic(closed_form.of(bare, (8, 0))).total == pytest.approx(parts.total)


def config_of(data, batch, **model):
    return from_dict(
        {
            "model": dataclasses.asdict(MODEL) | model,
            "mesh": {"data": data},
            "batch": {"global_batch": batch, "micro_batch": 1},
        }
    )


def test_a_plan_and_its_report_name_it(replica):
    options = PlanOptions(
        schedules=("1f1b",), saves=("dots",), others=((NAME, (2,)),), nearby=False, top=2, placed=1, oracle="no"
    )
    found = planning.plan_sections(to_dict(config_of(1, BATCH)), cluster(HOSTS, PER_HOST), options)
    assert " replica=2 (data x pipe x tensor)" in text.text(found.report)
    assert " replica=2 (data x pipe x tensor)" in found.html()
    assert plans.to_json(found.plan)["mesh"]["replica"] == 2
    assert sorted(found.plan.device_order) == list(range(8))


# --- An axis that splits a dim ----------------------------------------------------------------------------------------

SPLIT = "wide"
WIDE = AxisSpec(dims=("ffn",), inside=True, waits="layer")


@dataclasses.dataclass(frozen=True)
class WideMesh(MeshConfig):
    """The section mesh with an axis that splits the feed-forward part, as tensor does."""

    wide: int = 1


class Wide(Architecture):
    """A feed-forward part, whose kernels tensor and the new axis split."""

    axes = "tensor", SPLIT

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/up/kernel", "layers embed ffn"),
            kernel("layers/down/kernel", "layers ffn embed"),
            norm("final_norm/scale", "embed"),
        )

    def leave(self, y: jax.Array, c: LayerContext) -> jax.Array:
        return nn.leave(nn.leave(y, c.group.over(SPLIT)), c.group)

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.enter(nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group), c.group.over(SPLIT))
        return x + self.leave(nn.gelu(nn.columns(p["up"], h, "up")) @ p["down"]["kernel"], c)


class Forgetful(Wide):
    """One that sums over tensor alone."""

    def leave(self, y: jax.Array, c: LayerContext) -> jax.Array:
        return nn.leave(y, c.group)


class Joined(Wide):
    """One that sums over both axes at once, and names the minor one first."""

    def leave(self, y: jax.Array, c: LayerContext) -> jax.Array:
        return jax.lax.psum(y, (SPLIT, "tensor"))


MODULE = f"{__name__}:Wide"
WIDE_MODEL = dataclasses.replace(MODEL, module=MODULE)


@pytest.fixture
def wide(monkeypatch, in_order):
    add_axis(monkeypatch, SPLIT, WIDE, WideMesh)


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "tensor": 2, "wide": 2, "sequence_parallel": True},
        {"pipe": 2, "wide": 4},
        pytest.param({"data": 2, "tensor": 2, "wide": 2, "shard": "none"}, marks=pytest.mark.once),
    ],
)
def test_gradients_of_what_it_splits_are_those_of_one_device(wide, mesh):
    assert max(errors(MODULE, **mesh)) < 1e-5


def test_a_layer_without_its_sum_has_other_gradients(wide):
    assert max(errors(f"{__name__}:Forgetful", wide=2)) > 1e-2


def test_layers_that_know_tensor_alone_are_refused_and_not_planned_on_it(wide):
    c = config(wide=2)  # a GPT-2
    with pytest.raises(UserError, match=r"mesh\.wide=2 splits the dim ffn, but the layers of gpt2 run .* tensor alone"):
        small.trainer(c)
    space = enumerate_candidates(cluster(HOSTS, PER_HOST), c.model, BATCH, CHOICES)
    assert set(space.column("wide").tolist()) == {1}


def test_a_size_that_does_not_divide_its_dim_is_refused(wide):
    of = r"model\.ffn=64 is not divisible by"
    with pytest.raises(UserError, match=rf"{of} mesh\.tensor=1 x mesh\.wide=3; mesh\.wide=.* would fit"):
        config(wide=3)
    with pytest.raises(UserError, match=rf"{of} mesh\.tensor=2 x mesh\.wide=64; mesh\.wide=32 or 16 would fit"):
        config(tensor=2, wide=64)


def test_its_dim_is_split_on_devices_and_in_counts(wide):
    """A device has 64 / (2 x 4) of the 64 columns of up and rows of down, and all of the norm's 16 numbers."""
    c = config(MODULE, tensor=2, wide=4)
    trainer = small.trainer(c)
    shardings = trainer.state_shardings.params["layers"]
    found = {
        name: shardings[name]["kernel"].shard_shape(trainer.layout.shapes["layers"][name]["kernel"].shape)
        for name in ("up", "down")
    }
    assert found == {"up": (2, 16, 8), "down": (2, 8, 16)}
    assert parameters.kernels(c.model, c.mesh.layer_sizes) == ((16, 8), (8, 16))
    assert parameters.count(c.model, mesh=c.mesh.layer_sizes) == 16 * 8 + 8 * 16 + 16
    assert parameters.count(c.model) == 2 * 16 * 64 + 16


def test_the_search_tries_sizes_that_divide_its_dim_together(wide):
    sizes = itertools.product(range(1, 9), repeat=4)
    whole = ((d, p, t, w) for d, p, t, w in sizes if d * p * t * w == 8 and p <= 4 and PER_HOST % (t * w) == 0)
    # Two devices split six columns, and four do not.
    six = dataclasses.replace(WIDE_MODEL, heads=2, intermediate=6)
    expected = {mesh for mesh in whole if mesh[2] <= 2 and mesh[2] * mesh[3] in (1, 2)}
    space = enumerate_candidates(cluster(HOSTS, PER_HOST), six, BATCH, CHOICES)
    assert set(zip(*(space.column(name).tolist() for name in AXES))) == expected


def test_memory_is_that_of_the_parts_that_it_leaves(wide):
    made = Search(cluster(HOSTS, PER_HOST), WIDE_MODEL, BATCH, CHOICES, Budget(margin=False), Options(uneven=False))
    sizes = np.array([made.space.column(name) for name in (*AXES, "micro_batch")]).T.tolist()
    one = made.space.take(np.array([sizes.index([2, 1, 2, 2, 1])]))
    parts = closed_form.analytic(made.budget.shape(made.cluster, WIDE_MODEL, one))
    h, tokens, rows = MODEL.hidden, MODEL.sequence, MODEL.padded_vocab // 2
    held = 4 * (2 * h * 4 * h // 4 + h) + rows * h + h  # kernels of h x 4h over four devices, and norms
    assert parts.gradients == 4 * held
    assert parts.optimizer == 2 * 4 * held / 2
    # The workspace is the head's: logits of half of the vocabulary in float32 and in bfloat16.
    assert closed_form._head(made.budget.shape(made.cluster, WIDE_MODEL, one)) == (4 + 2) * tokens * rows


@pytest.mark.parametrize(("tensor", "size"), [(2, 4), (1, 8)])
def test_its_sum_is_costed_on_its_links(wide, tensor, size):
    """F and B have an all-reduce each over both axes: 2(n-1) latencies, and 2(n-1)/n of the bytes."""
    mesh, whole = layer_sizes({"tensor": tensor, SPLIT: size}), MODEL.sequence * MODEL.hidden * 2
    found = layer_program(WIDE_MODEL, mesh, False, "residuals")
    for work in (found.forward, found.backward):
        exchanged = {(one.kind, one.axes, one.bytes.each, one.times) for one in work.collectives}
        assert exchanged == {("all-reduce", (axis,), whole, 1) for axis in mesh}
    latency, rate, sheet = 1e-5, 1e11, SHEETS["h100"]
    slow, quick = (
        compute.sheet(WIDE_MODEL, sheet, mesh, 3, "residuals", link) for link in ((latency, rate), (0.0, 1e30))
    )
    expected = sum(2 * (n - 1) * (latency + 3 * whole / n / rate) for n in mesh.values())
    assert slow.forward - quick.forward == pytest.approx(expected)
    assert slow.backward - quick.backward == pytest.approx(expected)
    # The head's sums are over tensor alone.
    over_tensor = 2 * (tensor - 1) * (latency + 3 * whole / tensor / rate)
    assert slow.embedding - quick.embedding == pytest.approx(over_tensor)


def test_a_collective_over_several_axes_is_named_by_all_of_them(wide):
    model = dataclasses.replace(WIDE_MODEL, module=f"{__name__}:Joined")
    mesh, latency, rate = layer_sizes({"tensor": 2, SPLIT: 4}), 1e-5, 1e11
    found = layer_program(model, mesh, False, "residuals")
    assert [one.axes for one in found.forward.collectives] == [("tensor", SPLIT)]
    links = (latency, rate), (0.0, 1e30)
    slow, quick = (compute.sheet(model, SHEETS["h100"], mesh, 1, "residuals", link).forward for link in links)
    whole = MODEL.sequence * MODEL.hidden * 2
    assert slow - quick == pytest.approx(14 * (latency + whole / 8 / rate))  # a ring of eight


def test_a_plan_has_the_axis_and_its_parts(wide):
    options = PlanOptions(
        schedules=("1f1b",), saves=("dots",), others=((SPLIT, (2,)),), tensor=(2,), top=2, placed=1, oracle="no"
    )
    asked = to_dict(config_of(1, BATCH, module=MODULE))
    found = planning.plan_sections(asked, cluster(HOSTS, PER_HOST), options)
    assert " wide=2 (data x pipe x tensor)" in text.text(found.report)
    assert "Sums inside tensor and wide groups stay in their hosts" in found.html()
    c = found.plan.apply(asked)
    assert (c.mesh.tensor, c.mesh.wide, c.model.module) == (2, 2, MODULE)
    with pytest.raises(UserError, match="other trainers do not have the plan's wide=2"):
        exported.mesh_ranks(found.plan, ("data", "pipe", "tensor"))
    without = dataclasses.replace(c.mesh, data=2 * c.mesh.data, wide=1)
    plan = dataclasses.replace(found.plan, mesh=without, device_order=())
    assert exported.mesh_ranks(plan, ("data", "pipe", "tensor")).host.tolist() == [0] * 4 + [1] * 4
