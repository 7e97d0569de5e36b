"""The proof that a schedule's rows and slots are right: each op finds its own values, and no message is lost."""

from collections.abc import Iterator

from paxtrain.schedule.buffers import ARRIVALS, COLUMNS, GRADIENT_ARRIVALS, Buffers, row_kind
from paxtrain.schedule.table import ALONG, BETWEEN, UNDER, Schedule


class _Proof:
    """The table acted out with names for values: a value is its (virtual stage, micro-batch)."""

    def __init__(self, schedule: Schedule, buffers: Buffers) -> None:
        self.schedule, self.buffers = schedule, buffers
        self.stages, self.last = schedule.stages, schedule.virtual_stages - 1
        self.stage_map = schedule.stage_map
        self.residual: list[dict] = [{} for _ in range(self.stages)]
        self.inbox: list[dict] = [{} for _ in range(self.stages)]
        self.gradient_inbox: list[dict] = [{} for _ in range(self.stages)]
        self.seen: set[tuple] = set()  # ops that have run
        self.unread: set[tuple] = set()  # messages that no op has used
        self.sending: dict[int, tuple] = {}  # sender -> (receiver, gradient, chunk), made in the row before
        self.leaving: dict[int, tuple] = {}  # sender -> (receiver, activation, chunk), not yet on their way
        self.row = 0
        self.kept: set[tuple] = set()  # (stage, column) of the slots that this row writes

    def check(self, condition: bool, stage: int, what: str) -> None:
        if not condition:
            raise AssertionError(f"{self.schedule.name}: row {self.row}, stage {stage}: {what}")

    def run_row(self, row: int) -> None:
        self.row, self.kept = row, set()
        self.cells = [dict(zip(COLUMNS, map(int, self.buffers.table[row, s]))) for s in range(self.stages)]
        self.kind, travel = self.buffers.kinds[row], self.schedule.travel
        sent, leaving = self.sending, self.leaving
        if travel == BETWEEN:
            self._gradients_arrive(sent)
            self._activations_arrive(leaving)
        self._forward()
        if travel == UNDER:
            self._activations_arrive(self.leaving)
        self._weights()
        if travel == UNDER:
            self._gradients_arrive(sent)
        self._backward()
        if travel == ALONG:
            self._activations_arrive(leaving)
            self._gradients_arrive(sent)
        self._scrap()
        self._named()

    def _busy(self, phase: str) -> Iterator[tuple[int, dict[str, int], int]]:
        """Yield (stage, its cell, virtual stage) of the stages that run a phase in this row."""
        for s, cell in enumerate(self.cells):
            if cell[f"{phase}_valid"]:
                chunk = cell[f"{phase}_chunk"]
                self.check(chunk < self.schedule.chunks, s, f"there is no chunk {chunk}")
                yield s, cell, self.schedule.virtual_stage(s, chunk)

    def _runs(self, phase: str, stage: int, virtual: int, mb: int) -> None:
        self.check((phase, virtual, mb) not in self.seen, stage, f"{phase} of micro-batch {mb} again")
        self.seen.add((phase, virtual, mb))

    def _activations_arrive(self, sent: dict[int, tuple]) -> None:
        self.check(sorted(self.kind.send) == sorted((s, to) for s, (to, *_) in sent.items()), -1, "activation pairs")
        for s, (to, key, made_by) in sent.items():
            self.check(self.cells[s]["output_chunk"] == made_by, s, f"activation of chunk {made_by}")
            self.inbox[to][self._arrival(s, to, ARRIVALS)] = key
            self.unread.add(("a", *key))

    def _arrival(self, sender: int, receiver: int, columns: tuple[str, ...]) -> int:
        """Return the slot of a message that comes, which is the only one in its lane."""
        column = columns[self.stage_map.lane(sender, receiver)]
        self.check((receiver, column) not in self.kept, receiver, f"two messages for {column}")
        self.kept.add((receiver, column))
        return self.cells[receiver][column]

    def _gradients_arrive(self, sent: dict[int, tuple]) -> None:
        pairs = self.kind.receive + self.kind.receive_compressed
        self.check(sorted(pairs) == sorted((s, to) for s, (to, *_) in sent.items()), -1, "gradient pairs")
        for s, (to, key, made_by) in sent.items():
            self.check(self.cells[s]["message_chunk"] == made_by, s, f"message of chunk {made_by}")
            self.gradient_inbox[to][self._arrival(s, to, GRADIENT_ARRIVALS)] = key
            self.unread.add(("g", *key))

    def _forward(self) -> None:
        self.leaving = {}
        for s, cell, virtual in self._busy("forward"):
            mb = cell["forward"]
            self._runs("F", s, virtual, mb)
            if virtual:
                self.check(self.inbox[s].get(cell["input_slot"]) == (virtual, mb), s, f"no activation for {mb}")
                self.unread.discard(("a", virtual, mb))
            if self.schedule.trains:
                self.kept.add((s, "forward_slot"))
                self.residual[s][cell["forward_slot"]] = (virtual, mb)
            if virtual < self.last:
                self.leaving[s] = (self.stage_map.stage_of[virtual + 1], (virtual + 1, mb), cell["forward_chunk"])
            elif self.schedule.trains:
                self.kept.add((s, "head_slot"))
                self.gradient_inbox[s][cell["head_slot"]] = (virtual, mb)

    def _weights(self) -> None:
        for s, cell, virtual in self._busy("weights"):
            done, *key = self.residual[s].pop(cell["weights_slot"], (None,))
            self.check(done == "B" and key[0] == virtual, s, "B has left nothing for W")
            self.seen.add(("W", *key))

    def _backward(self) -> None:
        self.sending = {}
        for s, cell, virtual in self._busy("backward"):
            mb = cell["backward"]
            self._runs("B", s, virtual, mb)
            kept = self.residual[s].pop(cell["backward_slot"], None)
            self.check(kept == (virtual, mb), s, f"no residuals for {mb}")
            found = self.gradient_inbox[s].pop(cell["gradient_slot"], None)
            self.check(found == (virtual, mb), s, f"no gradient for {mb}")
            self.unread.discard(("g", virtual, mb))
            if self.schedule.splits:
                self.residual[s][cell["backward_slot"]] = ("B", virtual, mb)
            if virtual:
                self.sending[s] = (self.stage_map.stage_of[virtual - 1], (virtual - 1, mb), cell["backward_chunk"])

    def _scrap(self) -> None:
        """Check that what is written into a ring fits, and that other values go into the scrap slot."""
        depths = {
            "forward_slot": self.buffers.residual_depth,
            **dict.fromkeys(ARRIVALS, self.buffers.activation_depth),
            **dict.fromkeys(("head_slot", *GRADIENT_ARRIVALS), self.buffers.gradient_depth),
        }
        for s, cell in enumerate(self.cells):
            for name, depth in depths.items():
                fits = cell[name] < max(depth, 1) if (s, name) in self.kept else cell[name] == depth
                self.check(fits, s, f"{name} is {cell[name]}, and the scrap slot is {depth}")

    def _named(self) -> None:
        """Check that the row's kind names what has run."""
        f, b, w = (
            {(s, cell[phase + "_chunk"]) for s, cell, _ in self._busy(phase)}
            for phase in ("forward", "backward", "weights")
        )
        kind = self.kind
        found = row_kind(self.schedule, self.row, f, b, w, kind.receive, kind.receive_compressed, kind.send)
        self.check(kind == found, -1, "the row's kind leaves out an op")

    def finish(self) -> None:
        """Check that every op has run and every message was used."""
        schedule = self.schedule
        self.row = schedule.rows
        phases = ("FBW" if schedule.splits else "FB") if schedule.trains else "F"
        every = range(schedule.first, schedule.micro_batches)
        expected = {(p, q, mb) for p in phases for q in range(self.last + 1) for mb in every}
        self.check(self.seen == expected, -1, "an op is missing")
        if schedule.activations_wait:
            self.check(not self.leaving, -1, "an activation that was not sent")
        self.check(not self.unread and not self.sending, -1, "a message that no op used")


def validate(schedule: Schedule, buffers: Buffers) -> None:
    """Replay the table symbolically, and prove that each op finds the values it needs.

    Every op runs once. Every value that an op reads is there, in the slot that it reads, at the time within the row at
    which `Schedule.travel` lets messages come. Every message that is sent has one receiver, which uses it. A slot that
    is written with nothing to keep is the scrap slot. A row's kind names what runs in it.

    Raises:
        AssertionError: with the row, stage and op at fault.
    """
    proof = _Proof(schedule, buffers)
    for row in range(schedule.rows):
        proof.run_row(row)
    proof.finish()
