"""Options of planning: the plans that may be chosen, and the search for the best of them."""

import dataclasses

from paxtrain.config import SAVE_MODES, SHARDS, SPLIT_SAVES, OuterConfig
from paxtrain.config.axes import DATA, PIPE, TENSOR
from paxtrain.errors import UserError
from paxtrain.knobs import check, knob
from paxtrain.schedule.schedules import FILE, names, spec_of
from planner.cluster import device_sheets
from planner.cluster.cluster import PAXTRAIN
from planner.cost.candidate import NO_GROUPS
from planner.cost.coded import LOW_RANK, Coded
from planner.runs.trainers import TRAINERS
from planner.search.budget import Budget
from planner.search.search import Options
from planner.search.space import BACKWARD, TRIED, Choices

KINDS = ("epilogue", "all", "data")
AUTO, AUTOMATIC = "auto", ("epilogue", "data")  # the kinds that "auto" stands for
SEQUENCE = {"no": (False,), "yes": (True,), "both": (False, True)}
UNEVEN_DATA = SEQUENCE
GROUPS = ("configured", "sites")
ORACLE = ("auto", "yes", "no")
# What other trainers run: schedules, and the save modes that keep all of a layer or run it again as a whole.
SCHEDULES, SAVES = names(lambda spec: spec.common), ("residuals", "layer_inputs")
# Options that are choices of the search as they are.
_CHOSEN = (DATA, PIPE, TENSOR, "others", "micro_batch", "virtual_stages", "schedules", "saves", "backward_ranks")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of `planner.plan`; the flags of the mains have the same names.

    Attributes:
        trainer: who runs the plan: "paxtrain", this trainer, or another one of planner/runs/trainers.py, by whose
            constants it is then priced.
        compress: kinds of messages that may be compressed, since compression changes training: none, "auto"
            ("epilogue" and "data"), or some of "epilogue", "all" (gradients between stages) and "data" (gradients over
            data). What the configuration names a codec for may be compressed in any case.
        backward_ranks: ranks allowed for gradients between stages.
        data_ranks: ranks allowed for gradients over data.
        probe: file of losses of codecs on the model, probe.json of `python -m paxtrain.study --probe`; "" without. With
            it, "auto" chooses among these codecs, at each place and on all links.
        loss_budget: most loss that the codecs of --probe may cost together, as a share of dense training's.
        gain: least share of the step that each kind of compression must gain, since compression changes training.
        data: sizes of the data axis to try; empty for all that divide.
        tensor: sizes of the tensor axis to try; likewise.
        pipe: sizes of the pipe axis to try; likewise.
        others: sizes of other axes to try, by name; each has a flag of its name.
        micro_batch: sequences per micro-batch to try; likewise.
        virtual_stages: chunks per stage to try with interleaved schedules.
        shard: what is split over data, values of mesh.shard to try.
        sequence_parallel: whether the sequence is split if tensor is above 1: "no", "yes", or "both" to try both.
        schedules: schedules to try, or CSV files of schedules.
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

    trainer: str = knob(PAXTRAIN.trainer, among=(PAXTRAIN.trainer, *filter(None, TRAINERS)))
    compress: tuple[str, ...] = knob(())
    backward_ranks: tuple[int, ...] = knob((16,))
    data_ranks: tuple[int, ...] = knob((128,))
    probe: str = knob("")
    loss_budget: float = knob(0.01, least=0)
    gain: float = knob(0.01, least=0)
    data: tuple[int, ...] = knob(())
    tensor: tuple[int, ...] = knob(())
    pipe: tuple[int, ...] = knob(())
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()
    micro_batch: tuple[int, ...] = knob(())
    virtual_stages: tuple[int, ...] = knob((2, 4))
    shard: tuple[str, ...] = knob(("optimizer", "none", "gradients", "weights"), among=SHARDS)
    sequence_parallel: str = knob("both", among=tuple(SEQUENCE))
    schedules: tuple[str, ...] = knob(TRIED, among=names())
    saves: tuple[str, ...] = knob(SAVE_MODES, among=SAVE_MODES)
    uneven: bool = knob(True)
    uneven_data: str = knob("both", among=tuple(UNEVEN_DATA))
    groups: str = knob("configured", among=GROUPS)
    tensor_hosts: int = knob(1, least=1)
    usable_memory: float = knob(device_sheets.USABLE, least=0.05, most=1.0)
    memory_margin: bool = knob(True)
    quantile: float = knob(0.5, least=0.0, most=1.0)
    top: int = knob(10, least=1)
    placed: int = knob(4, least=1)
    nearby: bool = knob(True)
    seed: int = knob(0, least=0)
    oracle: str = knob("auto", among=ORACLE)

    def __post_init__(self) -> None:
        for kind in self.compress:
            if kind not in KINDS and self.compress != (AUTO,):
                raise UserError(f"--compress must be none, auto or some of {', '.join(KINDS)}, got {kind!r}")
        if self.trainer != PAXTRAIN.trainer:
            self._check_others()
        if self.probe and self.compress != (AUTO,):
            asked = ",".join(self.compress) or "none"
            raise UserError(f"--probe={self.probe} needs --compress={AUTO}, which it decides, got --compress={asked}")
        if unknown := [name for name in self.schedules if name not in names() and not name.endswith(FILE)]:
            raise UserError(f"--schedules must be some of {', '.join(names())}, got {unknown[0]!r}")
        for name in self.schedules:
            try:
                spec_of(name).travel(True)
            except ValueError as error:
                raise UserError(f"--schedules: {error}") from error
        check(self, *(("schedules",) if self.schedules else ()))
        if all(spec_of(name).splits for name in self.schedules) and not set(self.saves) & set(SPLIT_SAVES):
            known = " or ".join(SPLIT_SAVES)
            raise UserError(f"--schedules={','.join(self.schedules)} needs --saves={known}, got {','.join(self.saves)}")
        if min(self.virtual_stages, default=2) < 2:
            asked = ",".join(map(str, self.virtual_stages))
            raise UserError(
                f"--virtual_stages must be integers from 2 on, got {asked}; to plan without virtual stages leave "
                "interleaved_1f1b out of --schedules"
            )

    def _check_others(self) -> None:
        """Require what other trainers do.

        Raises:
            UserError: an option asks for something that only this trainer does.
        """
        alone = {"--compress": self.compress, "--uneven_data=yes": self.uneven_data == "yes"}
        alone |= {"--groups=sites": self.groups == "sites", "--oracle=yes": self.oracle == "yes"}
        for flag in (name for name, asked in alone.items() if asked):
            raise UserError(
                f"{flag} is for plans of paxtrain, which --trainer={self.trainer} does not run; leave it out"
            )
        for name, some, known in (("schedules", self.schedules, SCHEDULES), ("saves", self.saves, SAVES)):
            if not set(some) & set(known):
                given, able = ", ".join(some), ", ".join(known)
                raise UserError(f"--{name} must have some of {able} with --trainer={self.trainer}, got {given}")

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
            UserError: data ranks in groups are to have different numbers of micro-batches, or the trainer does not do
                what the configuration says.
        """
        if outer.every and self.uneven_data == "yes":
            raise UserError(
                f"--uneven_data=yes weighs sequences of data ranks that train together, but with "
                f"outer.every={outer.every} groups train apart; leave one of them out"
            )
        kinds, chosen = self.kinds(coded), {name: getattr(self, name) for name in _CHOSEN}
        uneven_data, own = UNEVEN_DATA[self.uneven_data], self.trainer == PAXTRAIN.trainer
        if not own:
            if coded.names or coded.forward_rank or outer.every:
                asked = "outer.every" if outer.every else "a codec"
                raise UserError(
                    f"the configuration has {asked}, which --trainer={self.trainer} does not run; plan without it"
                )
            chosen["schedules"] = tuple(name for name in self.schedules if name in SCHEDULES)
            chosen["saves"] = tuple(name for name in self.saves if name in SAVES)
            uneven_data = (False,)
        return Choices(
            **chosen,
            shards=self.shard,
            sequence_parallel=SEQUENCE[self.sequence_parallel],
            reduce_dtype=reduce_dtype,
            scan_layers=scan_layers,
            backward=tuple(kind for kind in kinds if kind in BACKWARD),
            data_ranks=self.data_ranks if "data" in kinds else (),
            min_ratio=min_ratio,
            coded=coded,
            uneven_data=uneven_data,
            in_flight=own,
            outer=outer,
        )

    def search(self) -> Options:
        """Return the options of the search."""
        return Options(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Options)})

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
