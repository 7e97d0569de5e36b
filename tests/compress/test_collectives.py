"""Reduce-scatter against numpy, on devices of one process and of several, and many collectives packed into one."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compress import collectives
from compress.collectives import packed, packed_gather, packed_scatter, reduce_scatter
from tests.compress.ranks import mapped
from tests.processes import run_processes


def lowered(function, platform, *arrays):
    return function.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


class TestReduceScatter:
    @pytest.mark.parametrize(("shape", "dim"), [((8,), 0), ((4, 3), 0), ((3, 16), 1), ((2, 8, 4), 1), ((2, 5, 4), 2)])
    def test_each_rank_has_its_part_of_the_sum_in_the_order_of_the_ranks(self, shape, dim):
        x = np.random.default_rng(3).normal(size=(4, *shape)).astype(np.float32)
        expected = np.split(((x[0] + x[1]) + x[2]) + x[3], 4, axis=dim)
        run = mapped(lambda x: reduce_scatter(x, "data", dim), 4)
        np.testing.assert_array_equal(run(x), expected)
        virtual = jax.vmap(lambda x: reduce_scatter(x, "data", dim), axis_name="data")
        np.testing.assert_array_equal(virtual(x), expected)
        reference = mapped(lambda x: lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True), 4)
        np.testing.assert_allclose(run(x), reference(x), rtol=1e-6, atol=1e-6)

    def test_narrow_types_are_added_in_float32(self):
        x = np.array([[256.0, 256.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])[:, [0, 0, 1, 1]]
        run = mapped(lambda x: reduce_scatter(x.astype(jnp.bfloat16), "data", 0), 4)
        # 259 rounds to 260; in bfloat16 each 1 would be lost.
        np.testing.assert_array_equal(run(x).astype(np.float32), np.full((4, 1), 260.0))

    def test_gpus_have_their_librarys_reduce_scatter_and_cpus_none(self):
        run = mapped(lambda x: reduce_scatter(x, "data", 0), 4)
        x = np.zeros((4, 8), np.float32)
        kinds = {platform: lowered(run, platform, x) for platform in ("cpu", "cuda")}
        assert "stablehlo.reduce_scatter" in kinds["cuda"] and "all_to_all" not in kinds["cuda"]
        assert "stablehlo.reduce_scatter" not in kinds["cpu"] and "all_to_all" in kinds["cpu"]


class TestRanksOfTwoAxes:
    """Ranks of two axes are those of one axis in row-major order, on devices and on axes that vmap emulates."""

    X = np.random.default_rng(5).normal(size=(4, 8, 3)).astype(np.float32)
    RUNS = (
        lambda x, axis: reduce_scatter(x, axis, 0),
        lambda x, axis: collectives.all_gather(x, axis, 1),
        lambda x, axis: collectives.all_to_all(x.reshape(4, 2, 3), axis),
        lambda x, axis: collectives.own_part(x, axis, 0),
        lambda x, axis: collectives.mean_of_ranks(x, axis),
    )

    @pytest.mark.parametrize("run", RUNS)
    def test_they_exchange_as_those_of_one_axis(self, run):
        one = mapped(lambda x: run(x, "data"), 4)(self.X)
        axes = "data", "context"
        mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
        spec = jax.sharding.PartitionSpec(axes)
        both = jax.shard_map(lambda x: run(x[0], axes)[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        np.testing.assert_array_equal(jax.jit(both)(self.X), one)
        emulated = jax.vmap(jax.vmap(lambda x: run(x, axes), axis_name="context"), axis_name="data")
        found = emulated(self.X.reshape(2, 2, *self.X.shape[1:]))
        np.testing.assert_allclose(found.reshape(4, *found.shape[2:]), one, rtol=1e-6)


# Each process prints how many of its results are wrong, by collective and size. The numbers are small integers, so that
# every sum is exact in float32 in any order: what differs from it by a bit is wrong.
STRESS = """
import json, time
import jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from compress.collectives import reduce_scatter

calls, kinds, sizes = json.loads(sys.argv[1])
rank, ranks = jax.process_index(), jax.process_count()
around = [(source, (source + 1) % ranks) for source in range(ranks)]
mesh = jax.make_mesh((ranks,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spec = PartitionSpec("data")
collectives = {
    "reduce_scatter": lambda x: reduce_scatter(x, "data", 0),
    "psum_scatter": lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True),
    "all_reduce": lambda x: lax.psum(x, "data"),
    "all_gather": lambda x: lax.all_gather(x, "data"),
    "permute": lambda x: lax.ppermute(x, "data", around),
}
delays = np.random.default_rng(rank)
for kind in kinds:
    run = jax.jit(jax.shard_map(
        lambda x: collectives[kind](x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    ))
    for size in sizes:
        count = size // 4 // ranks * (1 if kind == "all_gather" else ranks)  # of all_gather the result is that large
        every = np.stack([
            np.random.default_rng(r).integers(-(1 << 18), 1 << 18, count).astype(np.float32) for r in range(ranks)
        ])
        total = every.sum(axis=0, dtype=np.float64).astype(np.float32)
        expected = {"all_reduce": total, "all_gather": every, "permute": every[rank - 1]}.get(
            kind, total[rank * (count // ranks) :][: count // ranks]
        )
        x = jax.device_put(every[rank][None], jax.local_devices()[0])
        x = jax.make_array_from_single_device_arrays((ranks, count), NamedSharding(mesh, spec), [x])
        wrong = 0
        for call in range(calls):
            if call % 2:
                time.sleep(delays.uniform(0, 0.02))
            wrong += not np.array_equal(run(x).addressable_shards[0].data[0], expected)
        print("wrong", kind, size, wrong)
"""
OTHERS = ("all_reduce", "all_gather", "permute")


def stress(processes, calls, kinds, sizes):
    """Assert that every result of every call on every rank has the right bits."""
    limit = 60 + 20 * processes * len(kinds)
    task = json.dumps([calls, kinds, sizes])
    outputs = run_processes(STRESS, task, processes=processes, devices=1, limit=limit)
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("wrong")]
        assert lines == [f"wrong {kind} {size} 0" for kind in kinds for size in sizes]


@pytest.mark.once
def test_collectives_of_two_processes_are_right_at_any_timing():
    stress(2, 8, ("reduce_scatter", *OTHERS), (4 << 10, 1 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reduce_scatter", *OTHERS])
@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_collectives_between_processes_are_right_from_4_kib_to_64_mib(processes, kind):
    stress(processes, 100 // processes, (kind,), (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20))


class TestPacked:
    SHAPES = ((8,), (4, 3), (3, 16), (2, 5, 4))
    DIMS = (0, 0, 1, 2)

    def arrays(self):
        rng = np.random.default_rng(9)
        return [rng.normal(size=(4, *shape)).astype(np.float32) for shape in self.SHAPES]

    def test_one_reduction_of_many_arrays(self):
        mean = functools.partial(lax.pmean, axis_name="data")
        run = mapped(lambda *xs: packed(mean, xs), 4)
        single = mapped(lambda *xs: [mean(x) for x in xs], 4)
        assert all(map(np.array_equal, run(*self.arrays()), single(*self.arrays())))
        assert run.lower(*self.arrays()).as_text().count("stablehlo.all_reduce") == 1

    def test_one_reduce_scatter_of_many_arrays(self):
        run = mapped(lambda *xs: packed_scatter(xs, self.DIMS, "data"), 4)
        single = mapped(lambda *xs: [reduce_scatter(x, "data", dim) for x, dim in zip(xs, self.DIMS)], 4)
        virtual = jax.vmap(lambda *xs: packed_scatter(xs, self.DIMS, "data"), axis_name="data")
        expected = single(*self.arrays())
        assert all(map(np.array_equal, run(*self.arrays()), expected))
        assert all(map(np.allclose, virtual(*self.arrays()), expected))
        assert lowered(run, "cpu", *self.arrays()).count("stablehlo.all_to_all") == 1
        assert lowered(run, "cuda", *self.arrays()).count("stablehlo.reduce_scatter") == 1

    def test_one_all_gather_of_many_arrays(self):
        def gather(x, dim):
            return lax.all_gather(x, "data", axis=dim, tiled=True)

        run = mapped(lambda *xs: packed_gather(xs, self.DIMS, "data"), 4)
        single = mapped(lambda *xs: list(map(gather, xs, self.DIMS)), 4)
        virtual = jax.vmap(lambda *xs: packed_gather(xs, self.DIMS, "data"), axis_name="data")
        expected = single(*self.arrays())
        assert all(map(np.array_equal, run(*self.arrays()), expected))
        assert all(map(np.array_equal, virtual(*self.arrays()), expected))
        assert run.lower(*self.arrays()).as_text().count("stablehlo.all_gather") == 1

    def test_nothing_to_send(self):
        assert packed(lax.neg, []) == [] == packed_scatter([], [], "data") == packed_gather([], [], "data")
