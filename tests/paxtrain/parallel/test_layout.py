"""The mesh layout: every canonical parameter is in it once, and the conversion back is exact."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from paxtrain.config import BatchConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from paxtrain.model import transformer
from paxtrain.parallel.layout import Layout, names
from paxtrain.parallel.mesh import make_mesh

MODEL = ModelConfig(vocab_size=100, layers=4, hidden=48, heads=4, sequence=8)


def layout_of(layers=4, data=1, pipe=1, tensor=1, chunks=1, pipe_layers="", zero1=True, schedule="", **model):
    schedule = schedule or ("interleaved_1f1b" if chunks > 1 else "eager_1f1b")
    return Layout(
        Config(
            model=dataclasses.replace(MODEL, layers=layers, **model),
            mesh=MeshConfig(data, pipe, tensor, MeshConfig.of_zero1(zero1)),
            pipeline=PipelineConfig(schedule, chunks, pipe_layers),
            batch=BatchConfig(2 * data, 2),
        )
    )


LAYOUTS = {
    "one stage": layout_of(),
    "even": layout_of(pipe=2),
    "one layer each": layout_of(pipe=4),
    "uneven": layout_of(layers=7, pipe=3),
    "named": layout_of(layers=12, pipe=4, pipe_layers="3,4,4,1"),
    "interleaved": layout_of(layers=8, pipe=2, chunks=2),
    "interleaved, uneven": layout_of(layers=11, pipe=2, chunks=3, pipe_layers="2,2,3,1,2,1"),
    "interleaved, three stages": layout_of(layers=7, pipe=3, chunks=2),
    "all axes": layout_of(layers=5, data=2, pipe=2, tensor=2),
    "data only": layout_of(data=8),
    "tensor only": layout_of(tensor=4),
    "data that divides dims, but not tensor's shares": layout_of(data=8, tensor=4),
    "without ZeRO-1": layout_of(data=2, pipe=2, tensor=2, zero1=False),
    "data that divides little": layout_of(layers=6, data=3, pipe=2, hidden=16),
    "interleaved on all axes": layout_of(layers=8, data=2, pipe=2, tensor=2, chunks=2),
    "in a V": layout_of(layers=7, data=2, pipe=3, chunks=2, schedule="zb_v"),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def numbered(layout):
    """Return canonical parameters in which no two numbers are equal and none is zero."""
    leaves, tree = jax.tree.flatten(transformer.shapes(layout.config.model))
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
    values = [np.arange(end - math.prod(x.shape), end).reshape(x.shape) + 1 for x, end in zip(leaves, ends)]
    return jax.tree.unflatten(tree, [value.astype(np.float32) for value in values])


@functools.cache
def placed_on(layout):
    """Return `numbered` in mesh layout, as numpy arrays."""
    return jax.device_get(jax.jit(layout.from_canonical)(numbered(layout)))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def axes_of(part):
    return part if isinstance(part, tuple) else (part,) if part else ()


def with_paths(layout, specs):
    """Return (names, shape, spec) of every array of the mesh layout."""
    shapes = jax.tree_util.tree_leaves_with_path(layout.shapes)
    specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    return [(names(path), x.shape, spec) for (path, x), spec in zip(shapes, specs, strict=True)]


def folds(layout):
    return layout.config.pipeline.schedule == "zb_v"


@layouts
def test_canonical_to_mesh_and_back(layout):
    canonical = numbered(layout)
    placed = placed_on(layout)
    assert jax.tree.map(lambda x: x.shape, placed) == jax.tree.map(lambda x: x.shape, layout.shapes)
    same(jax.jit(layout.to_canonical)(placed), canonical)


@layouts
def test_each_layer_is_on_the_stage_where_a_token_meets_it(layout):
    """Chunk c of stage s is virtual stage cP + s, or cP + P-1-s on the way back of a V; layers are in model order."""
    met = [
        [int(layer) for layer in layout.layer_of[stage, chunk] if layer >= 0]
        for chunk in range(layout.chunks)
        for stage in sorted(range(layout.stages), reverse=folds(layout) and chunk == 1)
    ]
    assert [len(layers) for layers in met] == list(layout.counts)
    assert [layer for layers in met for layer in layers] == list(range(layout.config.model.layers))
    placed = placed_on(layout)["layers"]["up"]["bias"]
    rows = placed.reshape(layout.stages, layout.chunks, layout.slots, -1)
    canonical = numbered(layout)["layers"]["up"]["bias"]
    for where in np.ndindex(layout.layer_of.shape):
        layer = layout.layer_of[where]
        np.testing.assert_array_equal(rows[where], canonical[layer] if layer >= 0 else 0)


@layouts
def test_outside_the_layers_only_the_edge_stages_hold_anything(layout):
    canonical, placed, last = numbered(layout), placed_on(layout), 0 if folds(layout) else layout.stages - 1
    for found, expected, live in (
        (placed["embedding"]["token"], canonical["embedding"]["token"], {0, last}),
        (placed["embedding"]["position"], canonical["embedding"]["position"], {0}),
        (placed["final_norm"]["scale"], canonical["final_norm"]["scale"], {last}),
        (placed["final_norm"]["bias"], canonical["final_norm"]["bias"], {last}),
    ):
        for stage in range(layout.stages):
            np.testing.assert_array_equal(found[stage], expected if stage in live else np.zeros_like(expected))


def test_untied_tables_of_a_v_are_both_on_the_first_stage():
    layout = layout_of(layers=6, pipe=3, chunks=2, schedule="zb_v", tied_head=False)
    canonical, placed = numbered(layout), placed_on(layout)
    token = placed["embedding"]["token"]
    assert token.shape == (6, *canonical["embedding"]["token"].shape[1:])  # two rows a stage
    np.testing.assert_array_equal(token[:2], canonical["embedding"]["token"])
    assert not token[2:].any()
    same(jax.jit(layout.to_canonical)(placed), canonical)


def test_padding_is_the_share_of_empty_slots():
    assert LAYOUTS["even"].padding() == 0
    assert LAYOUTS["named"].padding() == pytest.approx(4 / 16)
    assert LAYOUTS["interleaved, uneven"].padding() == pytest.approx(1 - 11 / 18)


@layouts
@pytest.mark.parametrize("data", [True, False])
def test_specs_divide_the_shapes(layout, data):
    mesh = layout.config.mesh
    sizes = {"data": mesh.data, "pipe": mesh.pipe, "tensor": mesh.tensor}
    for path, shape, spec in with_paths(layout, layout.specs(data)):
        assert len(spec) == len(shape), path
        assert spec[0] == "pipe", path
        used = [axis for part in spec for axis in axes_of(part)]
        assert len(used) == len(set(used)), path
        for size, part in zip(shape, spec):
            assert size % math.prod(sizes[axis] for axis in axes_of(part)) == 0, (path, shape, spec)
        splits = (
            path[-2:]
            in {
                ("qkv", "kernel"),
                ("qkv", "bias"),
                ("out", "kernel"),
                ("up", "kernel"),
                ("up", "bias"),
                ("down", "kernel"),
            }
            or path[-1] == "token"
        )
        assert ("tensor" in used) == splits, path
        assert data or "data" not in used, path


@layouts
def test_zero1_splits_the_first_dim_that_divides(layout):
    mesh = layout.config.mesh
    dims = jax.tree.leaves(layout.data_dims())
    for (path, shape, spec), dim in zip(with_paths(layout, layout.specs()), dims, strict=True):
        split = ["data" in axes_of(part) for part in spec]
        if not mesh.zero1 or mesh.data == 1:
            assert dim == -1
            assert not any(split), path
            continue
        local = [n // (mesh.tensor if "tensor" in axes_of(part) else 1) for n, part in zip(shape, spec)]
        fits = [i for i in range(1, len(shape)) if local[i] % mesh.data == 0]
        assert dim == (fits[0] if fits else -1), (path, shape, spec)
        assert [i for i, found in enumerate(split) if found] == fits[:1], (path, shape, spec)


def test_zero1_leaves_nothing_whole_where_all_divides():
    assert -1 not in jax.tree.leaves(LAYOUTS["all axes"].data_dims())


def test_what_data_does_not_divide_is_replicated_over_it():
    dims = LAYOUTS["data that divides little"].data_dims()
    assert dims["layers"]["ln1"]["scale"] == -1
    assert dims["layers"]["qkv"]["kernel"] == 2
    assert dims["embedding"]["token"] == -1


@layouts
def test_canonical_specs_divide_and_use_each_axis_once(layout):
    mesh = layout.config.mesh
    sizes = {"data": mesh.data, "pipe": mesh.pipe, "tensor": mesh.tensor}
    canonical = jax.tree.leaves(transformer.shapes(layout.config.model))
    for (path, _, spec), x in zip(with_paths(layout, layout.canonical_specs()), canonical, strict=True):
        assert len(spec) == len(x.shape), path
        used = [axis for part in spec for axis in axes_of(part)]
        assert len(used) == len(set(used)), path
        for size, part in zip(x.shape, spec):
            assert size % math.prod(sizes[axis] for axis in axes_of(part)) == 0, (path, x.shape, spec)
        if path[0] == "layers" and path[-1] == "kernel":
            assert "pipe" in used, "no process writes a layer's kernels whole"


@pytest.mark.parametrize("name", ["all axes", "interleaved on all axes", "without ZeRO-1"])
def test_the_way_there_and_back_on_eight_devices(name):
    layout = LAYOUTS[name]
    mesh = make_mesh(layout.config.mesh)

    def shardings(specs):

        def is_spec(x):
            return isinstance(x, jax.sharding.PartitionSpec)

        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    canonical = jax.device_put(numbered(layout), shardings(layout.canonical_specs()))
    placed = jax.jit(layout.from_canonical, out_shardings=shardings(layout.specs()))(canonical)
    same(placed_on(layout), placed)
    same(jax.jit(layout.to_canonical, out_shardings=shardings(layout.canonical_specs()))(placed), canonical)


def test_layouts_of_equal_configurations_are_equal():
    assert layout_of(pipe=2) == layout_of(pipe=2)
    assert hash(layout_of(pipe=2)) == hash(layout_of(pipe=2))
    assert layout_of(pipe=2) != layout_of(pipe=4)
