"""The work of one layer on one device, read from its traced program, for any micro-batch."""

from typing import Any, NamedTuple


class Bytes(NamedTuple):
    """A number of bytes for any micro-batch.

    Attributes:
        fixed: bytes that do not depend on it.
        each: bytes of each of its sequences.
    """

    fixed: float
    each: float

    def of(self, micro_batch: Any) -> Any:
        """Return the bytes at a micro-batch, a number or an array."""
        return self.fixed + self.each * micro_batch


class MatrixProduct(NamedTuple):
    """Matrix products [M, K] x [K, N] of one shape, at a micro-batch of one sequence.

    Attributes:
        m: M.
        n: N.
        k: K.
        batch: number of independent products that one kernel computes.
        grows: name of the size that the micro-batch multiplies, or "".
        times: number of such kernels.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    grows: str = ""
    times: float = 1

    def sizes(self, micro_batch: int) -> tuple[int, int, int, int]:
        """Return M, N, K and the batch at a micro-batch."""
        whole = self._replace(**{self.grows: getattr(self, self.grows) * micro_batch}) if self.grows else self
        return whole.m, whole.n, whole.k, whole.batch


class LayerCollective(NamedTuple):
    """Collectives of one kind and size.

    Attributes:
        kind: name that paxtrain.xla.traced gives it.
        axes: mesh axes that it runs over, in the order of the mesh.
        bytes: bytes of one device's operand: for an all-gather its part, for a reduce-scatter all that it reduces.
        times: number of such collectives.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: Bytes
    times: float = 1


class Work(NamedTuple):
    """The products, collectives and bytes of a part of a layer.

    Attributes:
        products: matrix products, except those of attention.
        attention: matrix products with a batch, as attention's over all scores are: two in F and four in B.
        fused: matrix products that attention's fused kernels compute: two in F and five in B, of which one makes the
            scores again.
        collectives: collectives.
        moved: bytes that elementwise passes and reductions read and write.
        unknown: primitives of which the reader does not know what they are; their bytes are among those moved.
    """

    products: tuple[MatrixProduct, ...]
    attention: tuple[MatrixProduct, ...]
    fused: tuple[MatrixProduct, ...]
    collectives: tuple[LayerCollective, ...]
    moved: Bytes
    unknown: tuple[str, ...]

    def beyond(self, other: "Work") -> "Work":
        """Return what this work has besides another one, except what both move."""
        more = {name: _beyond(getattr(self, name), getattr(other, name)) for name in Work._fields[:4]}
        return self._replace(**more, moved=Bytes(0, 0), unknown=())


def _beyond(some: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    known = {one._replace(times=0): one.times for one in others}
    more = [one._replace(times=one.times - known.get(one._replace(times=0), 0)) for one in some]
    return tuple(one for one in more if one.times > 0)


class LayerProgram(NamedTuple):
    """One layer of a model on one device, in one save mode.

    Attributes:
        forward: F.
        backward: B if W is apart from it, with what it computes again.
        weights: W: the products that only the weights' gradients need.
        kept: bytes that F leaves for B.
        left: bytes that B adds to these for W, if the backward is split.
        moved: bytes that the passes of B and W move together, if W is not apart.
    """

    forward: Work
    backward: Work
    weights: Work
    kept: Bytes
    left: Bytes
    moved: Bytes
