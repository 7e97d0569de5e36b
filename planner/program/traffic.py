"""The bytes that a program's passes over memory move: elementwise operations and reductions, fused as XLA does.

A value lies in memory if something other than a pass makes or reads it (a matrix product, a collective, a kernel of
another kind), or if it is a result of the program or of a reduction. One kernel makes all values that read the same
arrays, and the reductions of one direction over them, if none waits for a reduction of another one. It reads each array
once, and writes what lies in memory. That is what XLA makes of GPT-2 and Llama for H100s.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from planner.program import operations
from planner.program.operations import Operation, Value


class _Fusion(NamedTuple):
    """A kernel of passes.

    Attributes:
        values: what it makes.
        reads: the arrays that it reads and that grow with the micro-batch.
        when: kernels before it, one after the other; the number of times that it runs; and of numbers that it computes.
        direction: direction of its reductions, if any.
    """

    values: list[Value]
    reads: set[Value]
    when: tuple[int, int, int]
    direction: str | None


class Traffic:
    """The passes of a program.

    Attributes:
        moved: arrays that they read or write, each with the number of times.
        unknown: names of primitives of which it is not known what they are.
    """

    def __init__(self, program: Sequence[Operation], batch: int, results: Iterable[Value] = ()) -> None:
        """Find the kernels.

        Args:
            program: the operations.
            batch: number that divides the sizes of arrays that grow with the micro-batch, and no others.
            results: results besides those that no operation reads.
        """
        self.moved: list[tuple[Any, int]] = []
        self.unknown = tuple(dict.fromkeys(one.name for one in program if not operations.is_known(one.name)))
        self._same: dict[Value, Value] = {}  # a view's array
        self._makers: dict[Value, Operation] = {}  # of passes
        self._stored: dict[Value, None] = {}
        self._reads: dict[Value, dict[Value, dict[Value, None]]] = {}
        self._levels: dict[Value, int] = {}
        apart = [one for one in program if not self._fuses(one)]
        read = {self._root(value) for one in program for value in one.reads}
        unread = [value for value in self._makers if value not in read]
        self._stored.update(dict.fromkeys([*unread, *map(self._root, results)]))
        self._store_what_is_read_twice(program, batch)
        for operation in apart:
            sources = [self._level(self._root(value)) for value in operation.reads]
            self._levels.update(dict.fromkeys(operation.makes, 1 + max(sources, default=0)))
            self._whole(operation)
        for kernel in self._kernels(batch):
            parts: dict[Value, dict[Value, None]] = {}
            for array, some in (item for value in kernel for item in self._read(value).items()):
                if array not in kernel:
                    parts.setdefault(array, {}).update(some)
            turns = self._makers[kernel[0]].turns
            self.moved += [(value.aval, turns) for value in kernel]
            for array, taken in parts.items():
                least = [array] if sum(part.size for part in taken) >= array.size else taken
                self.moved += [(value.aval, turns) for value in least]

    def _root(self, value: Value) -> Value:
        while value in self._same:
            value = self._same[value]
        return value

    def _fuses(self, operation: Operation) -> bool:
        """Return whether an operation is a pass or a view, after noting what it makes and what lies in memory."""
        sources = [self._root(value) for value in operation.reads]
        if operation.name in operations.VIEWS:
            self._same.update(zip(operation.makes, sources))
            if operation.name == "optimization_barrier":
                self._stored.update(dict.fromkeys(sources))
            return True
        if operation.name in operations.PASSES:
            self._makers.update(dict.fromkeys(operation.makes, operation))
            return True
        self._stored.update(dict.fromkeys([*sources, *operation.makes]))
        return False

    def _store_what_is_read_twice(self, program: Sequence[Operation], batch: int) -> None:
        """Note which values passes write to memory, because others read them.

        Those are reductions, except those along the rows of one array of which one array is made: a kernel holds a row.
        Those are values of costly functions that several operands of a concatenation need: each is computed apart. And
        those are values of which several parts go on in passes, as in each level of an associative scan.
        """
        users: dict[Value, list[Operation]] = {}
        for operation in program:
            for source in map(self._root, operation.reads):
                users.setdefault(source, []).append(operation)
        for value in self._makers:
            direction = self._direction(value)
            if direction == "over":
                self._stored[value] = None
            elif direction == "along" and value not in self._stored:
                ends = self._found([value], lambda one: [x for user in users.get(one, ()) for x in user.makes])
                arrays = self._found(ends, self._sources)
                if len(ends) > 1 or len([array for array in arrays if array.aval.size % batch == 0]) > 1:
                    self._stored[value] = None
        for value in self._makers:
            parts = [user for user in users.get(value, ()) if user.name in operations.PARTS and len(user.reads) == 1]
            if sum(not all(part in self._stored for part in user.makes) for user in parts) > 1:
                self._stored[value] = None
        for operation in program:
            if operation.name in ("concatenate", "stack"):
                costly = [self._found([value], self._sources, operations.COSTLY) for value in operation.reads]
                for value in (one for i, some in enumerate(costly) for one in some if one in set().union(*costly[:i])):
                    self._stored[value] = None
        # What is made of no array is made anew by each kernel that reads it.
        anew = [one for one in self._stored if one in self._makers and not self._found([one], self._sources)]
        for value in anew:
            del self._stored[value]

    def _sources(self, value: Value) -> list[Value]:
        maker = self._makers.get(value)
        return [self._root(source) for source in maker.reads] if maker else []

    def _found(
        self, start: Iterable[Value], onward: Callable[[Value], list[Value]], names: Container[str] = ()
    ) -> list[Value]:
        """Return the nearest values that lie in memory, or that primitives of some names make, on the way from others.

        Args:
            start: the others.
            onward: function from a value to those next to it.
            names: names of the primitives.
        """
        found: dict[Value, None] = {}
        seen: set[Value] = set()
        todo = [after for value in start for after in onward(value)]
        while todo:
            value = self._root(todo.pop())
            if value in seen:
                continue
            seen.add(value)
            maker = self._makers.get(value)
            if value in self._stored or maker is None or maker.name in names:
                found[value] = None
            else:
                todo += onward(value)
        return list(found)

    def _whole(self, operation: Operation) -> None:
        """Add what a kernel moves that is no pass."""
        if operation.name in operations.UPDATES:
            number, times = operations.UPDATES[operation.name]
            self.moved.append((operation.equation.invars[number].aval, times * operation.turns))
        elif operation.name in operations.WHOLE or not operations.is_known(operation.name):
            self.moved += [(value.aval, operation.turns) for value in (*operation.reads, *operation.makes)]

    def _read(self, value: Value) -> dict[Value, dict[Value, None]]:
        """Return the arrays in memory from which a pass makes a value, each with the parts that it reads."""
        if value not in self._reads:
            operation = self._makers[value]
            found: dict[Value, dict[Value, None]] = {}
            for source in map(self._root, operation.reads):
                stored = source in self._stored or source not in self._makers
                for array, parts in ({source: {source: None}} if stored else self._read(source)).items():
                    less = operation.name in operations.PARTS and value.size < sum(part.size for part in parts)
                    found.setdefault(array, {}).update({value: None} if less else parts)
            self._reads[value] = found
        return self._reads[value]

    def _level(self, value: Value) -> int:
        """Return how many kernels run one after the other before a value can be read."""
        if value not in self._makers:
            return self._levels.get(value, 0)
        if value not in self._levels:
            waits = [self._level(array) + (self._direction(array) is not None) for array in self._read(value)]
            self._levels[value] = max(waits, default=0)
        return self._levels[value]

    def _direction(self, value: Value) -> str | None:
        """Return whether a value is a reduction along rows or over them, or None if it is none."""
        operation = self._makers.get(value)
        if operation is None or operation.name not in operations.REDUCTIONS:
            return None
        last = operation.equation.invars[0].aval.ndim - 1
        return "along" if last in operation.equation.params["axes"] else "over"

    def _kernels(self, batch: int) -> list[list[Value]]:
        """Return the values that each kernel makes.

        Those of one size that read the same array are made by one kernel, and a reduction by the one that makes what it
        reads, unless that has reductions of another direction.
        """
        kernels: list[_Fusion] = []
        made = [value for value in self._makers if value in self._stored]
        for value in sorted(made, key=lambda one: self._direction(one) is not None):
            maker, direction = self._makers[value], self._direction(value)
            size = maker.reads[0].aval.size if direction else value.aval.size
            when = self._level(value), maker.turns, size
            arrays = {array for array in self._read(value) if array.aval.size % batch == 0}
            found = [
                one
                for one in kernels
                if one.when == when
                and one.direction in (None, direction)
                and (arrays & set(one.values) or (one.direction == direction and arrays & one.reads))
            ]
            together = found if direction is None else found[:1]
            kernels = [one for one in kernels if one not in together]
            values = [*(other for one in together for other in one.values), value]
            kernels.append(_Fusion(values, arrays.union(*(one.reads for one in together)), when, direction))
        return [one.values for one in kernels]
