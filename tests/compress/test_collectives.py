"""Many collectives packed into one."""

import functools

import jax
import numpy as np
from jax import lax

from compress.collectives import packed, packed_gather, packed_scatter
from tests.compress.ranks import mapped


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
        def scatter(x, dim):
            return lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True)

        run = mapped(lambda *xs: packed_scatter(xs, self.DIMS, "data"), 4)
        single = mapped(lambda *xs: list(map(scatter, xs, self.DIMS)), 4)
        virtual = jax.vmap(lambda *xs: packed_scatter(xs, self.DIMS, "data"), axis_name="data")
        expected = single(*self.arrays())
        assert all(map(np.array_equal, run(*self.arrays()), expected))
        assert all(map(np.allclose, virtual(*self.arrays()), expected))
        assert run.lower(*self.arrays()).as_text().count("stablehlo.reduce_scatter") == 1

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
