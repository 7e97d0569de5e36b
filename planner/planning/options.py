"""Options of planning: the plans that may be chosen, and the search for the best of them."""

import dataclasses
import math
from collections.abc import Sequence

from paxtrain.config import SAVE_MODES, SPLIT_SAVES, OuterConfig
from paxtrain.errors import UserError
from paxtrain.schedule.schedules import FILE, SPECS, names
from planner.cost.candidate import NO_GROUPS
from planner.cost.coded import LOW_RANK, Coded
from planner.memory import closed_form
from planner.search.budget import Budget
from planner.search.search import Options
from planner.search.space import BACKWARD, TRIED, Choices

KINDS = ("epilogue", "all", "data")
AUTO, AUTOMATIC = "auto", ("epilogue", "data")  # the kinds that "auto" stands for
SEQUENCE = {"no": (False,), "yes": (True,), "both": (False, True)}
UNEVEN_DATA = SEQUENCE
ZERO1 = {"no": (False,), "yes": (True,), "both": (True, False)}
GROUPS = ("configured", "sites")
ORACLE = ("auto", "yes", "no")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of `planner.plan`; the flags of the mains have the same names.

    Attributes:
        compress: kinds of messages that may be compressed, since compression changes training: none, "auto"
            ("epilogue" and "data"), or some of "epilogue", "all" (gradients between stages) and "data" (gradients over
            data). What the configuration names a codec for may be compressed in any case.
        backward_ranks: ranks allowed for gradients between stages.
        data_ranks: ranks allowed for gradients over data.
        probe: file of losses of codecs on the model, probe.json of `python -m paxtrain.study --probe`; "" without. With
            it, "auto" chooses among these codecs, at each place and on all links.
        loss_budget: most loss that the codecs of a probe may cost together, as a share of dense training's.
        gain: least share of the step that each kind of compression must gain, since compression changes training.
        data: sizes of the data axis to try; empty for all that divide.
        tensor: sizes of the tensor axis to try; likewise.
        pipe: sizes of the pipe axis to try; likewise.
        micro_batch: sequences per micro-batch to try; likewise.
        virtual_stages: chunks per stage to try with interleaved schedules.
        zero1: whether the optimizer's state is split over data: "no", "yes", or "both" to try both.
        sequence_parallel: whether the sequence is split if tensor is above 1: "no", "yes", or "both" to try both.
        schedules: schedules to try.
        saves: save modes to try, which say what a forward keeps for its backward.
        uneven: whether uneven splits of the layers over the stages are tried too.
        uneven_data: whether data ranks on slow devices get fewer micro-batches: "no", "yes", or "both" to try both.
        groups: number of groups that train apart, if the configuration has outer.every: "configured" (outer.groups), or
            "sites" for one on each site of the cluster.
        tensor_hosts: consecutive hosts that each tensor group spans.
        usable_memory: share of a device's memory to use, 0.05 to 1.
        memory_margin: whether the closed form's safety margin is added to the memory that plans are predicted to need.
        quantile: quantile of the link samples for which placements are optimized, 0 to 1.
        top: number of plans to rank.
        placed: largest number of meshes and schedules to place thoroughly.
        nearby: whether plans on fewer hosts and for batches near by are looked for, to be told.
        seed: seed of the annealing.
        oracle: whether the best plans are compiled to check their memory: "yes", "no", or "auto" to do so if jax has
            its CUDA plugin.

    Raises:
        UserError: a value is none of those above.
    """

    compress: tuple[str, ...] = ()
    backward_ranks: tuple[int, ...] = (16,)
    data_ranks: tuple[int, ...] = (128,)
    probe: str = ""
    loss_budget: float = 0.01
    gain: float = 0.01
    data: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    pipe: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    virtual_stages: tuple[int, ...] = (2, 4)
    zero1: str = "both"
    sequence_parallel: str = "both"
    schedules: tuple[str, ...] = tuple(TRIED)
    saves: tuple[str, ...] = SAVE_MODES
    uneven: bool = True
    uneven_data: str = "both"
    groups: str = "configured"
    tensor_hosts: int = 1
    usable_memory: float = closed_form.USABLE
    memory_margin: bool = True
    quantile: float = 0.5
    top: int = 10
    placed: int = 4
    nearby: bool = True
    seed: int = 0
    oracle: str = "auto"

    def __post_init__(self) -> None:
        for kind in self.compress:
            if kind not in KINDS and self.compress != (AUTO,):
                raise UserError(f"--compress must be none, auto or some of {', '.join(KINDS)}, got {kind!r}")
        if self.probe and self.compress != (AUTO,):
            given = ",".join(self.compress) or "none"
            raise UserError(f"--probe={self.probe} needs --compress={AUTO}, which it decides, got --compress={given}")
        files = tuple(name for name in self.schedules if name.endswith(FILE))
        _check_known("schedules", self.schedules, names() + files)
        for name in self.schedules:
            try:
                SPECS[name].travel(True)
            except ValueError as error:
                raise UserError(f"--schedules: {error}") from error
        _check_known("saves", self.saves, SAVE_MODES)
        if all(SPECS[name].splits for name in self.schedules) and not set(self.saves) & set(SPLIT_SAVES):
            known = " or ".join(SPLIT_SAVES)
            raise UserError(f"--schedules={','.join(self.schedules)} needs --saves={known}, got {','.join(self.saves)}")
        for name in ("backward_ranks", "data_ranks", "data", "tensor", "pipe", "micro_batch", "virtual_stages"):
            values = getattr(self, name)
            if not all(type(value) is int and value > 0 for value in values):
                given = ",".join(map(str, values))
                raise UserError(f"--{name} must be positive integers joined by commas, got {given}")
        if min(self.virtual_stages, default=2) < 2:
            given = ",".join(map(str, self.virtual_stages))
            raise UserError(
                f"--virtual_stages must be integers from 2 on, got {given}; to plan without virtual stages leave "
                "interleaved_1f1b out of --schedules"
            )
        answers = {
            "zero1": ZERO1,
            "sequence_parallel": SEQUENCE,
            "uneven_data": UNEVEN_DATA,
            "groups": GROUPS,
            "oracle": ORACLE,
        }
        for name, choices in answers.items():
            if getattr(self, name) not in choices:
                raise UserError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        bounds = {
            "gain": (0.0, math.inf),
            "loss_budget": (0.0, math.inf),
            "usable_memory": (0.05, 1.0),
            "quantile": (0.0, 1.0),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not math.isfinite(value):
                raise UserError(f"--{name} must be a number, got {value}")
            if not low <= value <= high:
                raise UserError(f"--{name} must be {low:g} to {high:g}, got {value:g}")
        for name, least in (("top", 1), ("placed", 1), ("seed", 0), ("tensor_hosts", 1)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(self, name)}")

    def kinds(self, coded: Coded = LOW_RANK) -> tuple[str, ...]:
        """Return the kinds of messages that may be compressed.

        Args:
            coded: codecs that the configuration names.
        """
        named = (("epilogue", coded.backward), ("data", coded.data))
        asked = AUTOMATIC if self.compress == (AUTO,) else self.compress
        return asked or tuple(kind for kind, codec in named if codec is not None)

    def asked(self, choices: Choices) -> Choices:
        """Return choices without the kinds of compression that "auto" allows, unless their ranks or codecs are given.

        Args:
            choices: what `choices` has returned.
        """
        if self.compress != (AUTO,):
            return choices
        backward = choices.coded.backward is not None or self.backward_ranks != PlanOptions.backward_ranks
        data = choices.coded.data is not None or self.data_ranks != PlanOptions.data_ranks
        return dataclasses.replace(
            choices, backward=choices.backward if backward else (), data_ranks=choices.data_ranks if data else ()
        )

    def choices(
        self,
        min_ratio: float,
        reduce_dtype: str,
        coded: Coded = LOW_RANK,
        outer: OuterConfig = NO_GROUPS,
        scan_layers: str = "auto",
    ) -> Choices:
        """Return the choices that the search may make.

        Args:
            min_ratio: least ratio of compression; see CompressConfig.
            reduce_dtype: dtype in which gradients are summed over data; see MeshConfig.
            coded: codecs other than low rank, which have no ranks.
            outer: groups of data ranks that train apart.
            scan_layers: whether layers run in a loop; see PipelineConfig.

        Raises:
            UserError: data ranks in groups are to have different numbers of micro-batches.
        """
        if outer.every and self.uneven_data == "yes":
            raise UserError(
                f"--uneven_data=yes weighs sequences of data ranks that train together, but with "
                f"outer.every={outer.every} groups train apart; leave one of them out"
            )
        kinds = self.kinds(coded)
        return Choices(
            data=self.data,
            tensor=self.tensor,
            pipe=self.pipe,
            micro_batch=self.micro_batch,
            virtual_stages=self.virtual_stages,
            zero1=ZERO1[self.zero1],
            sequence_parallel=SEQUENCE[self.sequence_parallel],
            reduce_dtype=reduce_dtype,
            schedules=self.schedules,
            saves=self.saves,
            scan_layers=scan_layers,
            backward=tuple(kind for kind in kinds if kind in BACKWARD),
            backward_ranks=self.backward_ranks,
            data_ranks=self.data_ranks if "data" in kinds else (),
            min_ratio=min_ratio,
            coded=coded,
            uneven_data=UNEVEN_DATA[self.uneven_data],
            outer=outer,
        )

    def search(self) -> Options:
        """Return the options of the search."""
        return Options(
            top=self.top,
            placed=self.placed,
            quantile=self.quantile,
            seed=self.seed,
            uneven=self.uneven,
            gain=self.gain,
        )

    def budget(
        self,
        error: str,
        scan_layers: str,
        coded: Coded = LOW_RANK,
        outer: OuterConfig = NO_GROUPS,
        min_ratio: float = 2.0,
    ) -> Budget:
        """Return the memory that a plan may use.

        Args:
            error: treatment of the errors of compressed messages; see CompressConfig.
            scan_layers: whether layers run in a loop; see PipelineConfig.
            coded: codecs other than low rank.
            outer: groups of data ranks that train apart.
            min_ratio: least ratio of compression, for what groups exchange; see CompressConfig.
        """
        return Budget(self.usable_memory, error, scan_layers, self.memory_margin, coded, outer, min_ratio)


def _check_known(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    if not values:
        raise UserError(f"--{name} must be some of {', '.join(known)}, got none")
    for value in values:
        if value not in known:
            raise UserError(f"--{name} must be some of {', '.join(known)}, got {value!r}")
