"""A plan: the mesh and its devices, the pipeline, the batch and the compression.

`--plan=plan.json` overrides these sections of the configuration.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from paxtrain import files
from paxtrain.config.compress import CompressConfig
from paxtrain.config.config import Config
from paxtrain.config.load import from_dict, read_section, renewed
from paxtrain.config.model import ModelConfig
from paxtrain.config.optimizer import OuterConfig
from paxtrain.config.parallel import BatchConfig, MeshConfig, PipelineConfig
from paxtrain.errors import UserError, printable

VERSION = 1
# Terms of a step that `predicted["terms"]` may have, seconds by stage that add up to the step. The first three have the
# collectives inside of layers and what idle stages compute on scrap; backward has both parts of a split B. Compression
# is that of messages; transfer what messages between stages expose, and the bubble; gather and reduce are collectives
# over data; sync is the wait for the slowest stage; host is what no device does, as a run measured it.
FORWARD, BACKWARD, HEAD, COMPRESSION = COMPUTE = ("forward", "backward", "head", "compression")
TRANSFER, GATHER, REDUCE, SYNC, OPTIMIZER, HOST = ("transfer", "gather", "reduce", "sync", "optimizer", "host")
_DEEPEST = 32  # lists and objects inside each other in a plan's JSON, which dataclasses.asdict walks by recursion
# Fields of ModelConfig that a plan keeps of the model that it was made for.
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "vocab_size", "sequence")
_SHAPE = ("family", "module", *_SIZES)
_LATER = ("context", "context_form", "shard_group")  # keys that plans of earlier versions lack
_SECTIONS = {"mesh": MeshConfig, "pipeline": PipelineConfig, "batch": BatchConfig, "compress": CompressConfig}


@dataclasses.dataclass(frozen=True)
class PlannedGroups:
    """The groups of data ranks that a plan is for, as `OuterConfig` has them.

    Attributes:
        every: steps between exchanges.
        groups: number of groups.
        fragments: parts of the weights, each exchanged by itself.
        overlap: steps after which groups take what an exchange brings.
    """

    every: int
    groups: int
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "overlap" else 1
            if value < least:
                raise UserError(f"outer.{field.name} of a plan must be {least} or more, got {value}")


def check_planned(planned: PlannedGroups | None, outer: OuterConfig) -> None:
    """Require that a configuration's groups are those that a plan is for; outer.groups=0 leaves their number to it.

    Raises:
        UserError: they are others.
    """
    if planned is None:
        if outer.every:
            raise UserError(
                f"the plan is for training without groups, but the configuration has outer.every={outer.every}; plan "
                f"with --model.outer.every={outer.every}, or train without outer.every"
            )
        return
    for field in dataclasses.fields(planned):
        given, wanted = getattr(outer, field.name), getattr(planned, field.name)
        if given != wanted and (field.name, given) != ("groups", 0):
            raise UserError(
                f"the plan is for groups with outer.{field.name}={wanted}, but the configuration has "
                f"outer.{field.name}={given}; train with outer.{field.name}={wanted}, or plan anew"
            )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A decision about one model on one cluster.

    Attributes:
        mesh: sizes of the axes.
        pipeline: schedule, layers per stage, and saved activations.
        batch: global batch and micro-batch.
        compress: compression of messages and gradients.
        hosts: names of the hosts in the order in which `device_order` counts their devices; empty: the order of
            the processes.
        devices_per_host: devices of each host; 0, which needs empty `hosts`: not known.
        device_order: index into all hosts' devices, host after host, for every mesh position (row-major over data,
            pipe, tensor); empty: 0, 1, 2, ...
        outer: groups of data ranks that it is for; None: all train together. The configuration must have the same, or
            leave their number open.
        module: model.module that it is for, which a configuration takes from it; empty: a family's, or not said.
        predicted: the planner's figures with their sources. A run prints `step_seconds` (of groups the median,
            `groups.median_step_seconds`) and `terms` beside what it measured; nothing depends on them.
    """

    mesh: MeshConfig
    pipeline: PipelineConfig
    batch: BatchConfig
    compress: CompressConfig
    hosts: tuple[str, ...] = ()
    devices_per_host: int = 0
    device_order: tuple[int, ...] = ()
    outer: PlannedGroups | None = None
    module: str = ""
    predicted: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.outer and self.mesh.data % self.outer.groups:
            raise UserError(f"outer.groups={self.outer.groups} does not divide mesh.data={self.mesh.data}")
        devices, given = self.mesh.devices, len(self.device_order)
        if given and (given != devices or sorted(self.device_order) != list(range(devices))):
            raise UserError(
                f"device_order must name each of the mesh's {devices} devices once, got {given} "
                f"entries with {len(set(self.device_order))} different ones"
            )
        if self.hosts and len(set(self.hosts)) != len(self.hosts):
            raise UserError(f"hosts must differ from each other, got {', '.join(self.hosts)}")
        if self.devices_per_host < 0 or (self.devices_per_host and devices % self.devices_per_host):
            raise UserError(
                f"devices_per_host must divide the mesh's {devices} devices, or be 0, got {self.devices_per_host}"
            )
        if self.hosts and len(self.hosts) * self.devices_per_host != devices:
            raise UserError(
                f"{len(self.hosts)} hosts with devices_per_host={self.devices_per_host} have "
                f"{len(self.hosts) * self.devices_per_host} devices, but the mesh needs {devices}"
            )

    def keys(self) -> tuple[str, ...]:
        """Return the sections and the keys of a configuration that `apply` replaces."""
        return (*_SECTIONS, *(["outer.groups"] if self.outer else []), *(["model.module"] if self.module else []))

    def apply(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration of `values` (sections, as config.from_dict takes them) with this plan's sections.

        Raises:
            UserError: the plan's sections do not fit the others, it is for other groups or another architecture, or a
                section that it replaces makes no sense by itself.
        """
        for name, section in _SECTIONS.items():
            read_section(section, values.get(name, {}), name)
        outer = dict(values.get("outer", {}))
        check_planned(self.outer, read_section(OuterConfig, outer, "outer"))
        if self.outer:
            values = {**values, "outer": outer | {"groups": self.outer.groups}}
        if self.module:
            model = values.get("model", {})
            if (given := model.get("module") or self.module) != self.module:
                raise UserError(
                    f"the plan is for model.module={self.module}, but the configuration has model.module={given}; "
                    f"train with model.module={self.module}, or plan anew"
                )
            values = {**values, "model": {**model, "module": self.module}}
        return from_dict({**values, **{name: dataclasses.asdict(getattr(self, name)) for name in _SECTIONS}})


def shape(model: ModelConfig) -> dict[str, object]:
    """Return what a plan keeps of the model that it was made for, as JSON values."""
    sizes = {"kv_heads": model.key_value_heads, "head_size": model.head_dim, "intermediate": model.ffn}
    return {name: sizes.get(name, getattr(model, name)) for name in _SHAPE}


def other_model(plan: Plan, model: ModelConfig) -> str:
    """Return a sentence that says that a plan was made for another model; "" if it was not, or does not say for which.

    Args:
        plan: the plan.
        model: the model that it is used for.
    """
    planned, here = plan.predicted.get("model"), shape(model)
    if not isinstance(planned, dict):
        return ""
    different = [name for name in _SHAPE if name in planned and planned[name] != here[name]]
    if not different:
        return ""
    name = printable(str(planned.get("name") or "another model"), 80)
    theirs, ours = (", ".join(f"model.{key}={some[key]}" for key in different[:3]) for some in (planned, here))
    return printable(
        f"the plan was made for {name} ({theirs}), and the configuration has {ours}: its mesh, pipeline and batch are "
        "taken all the same, but its seconds and its memory are the other model's"
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    values = dataclasses.asdict(plan)
    if plan.outer is None:
        del values["outer"]
    if not plan.module:
        del values["module"]
    return json.loads(json.dumps({"version": VERSION, **values}))


def save(plan: Plan, path: str | pathlib.Path) -> None:
    """Write a plan as JSON."""
    files.write(path, json.dumps(to_json(plan), indent=2) + "\n")


def load(path: str | pathlib.Path) -> Plan:
    """Read a plan.

    Raises:
        UserError: the file cannot be read or is no JSON object, or it has wrong keys or values.
    """
    return files.read_json(path, "plan", "name a plan.json as paxtrain/config/plan.py describes it", from_json)


def _is_deep(values: object) -> bool:
    """Return whether lists and objects lie deeper inside each other than `_DEEPEST`."""
    level = [values]
    for _ in range(_DEEPEST):
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [item for items in lists for item in items]
    return any(isinstance(each, dict | list) for each in level)


def _check_whole(name: str, section: dict[str, Any], given: dict[str, Any]) -> None:
    """Require that all values of a section are given, which a plan says.

    Raises:
        UserError: some are not.
    """
    if missing := [key for key in section if key not in given and key not in _LATER]:
        raise UserError(f"{name} leaves out {', '.join(missing)}; a plan says all of {', '.join(section)}")
    for key, value in section.items():
        if isinstance(value, dict) and key != "options":  # those of codecs have defaults of their own
            _check_whole(f"{name}.{key}", value, given[key])


def from_json(values: object) -> Plan:
    """Return the plan that JSON values describe.

    Raises:
        UserError: the values are no JSON object, keys are unknown or missing, or values do not fit.
    """
    if not isinstance(values, dict):
        raise UserError(f"a plan must be a JSON object, got {type(values).__name__}")
    if _is_deep(values):
        raise UserError(f"a plan has lists and objects at most {_DEEPEST} deep inside each other, this one has more")
    version = values.get("version")
    if type(version) is not int or version != VERSION:  # True == 1, too
        raise UserError(f"version must be {VERSION}, got {version!r}")
    plan = read_section(Plan, {key: value for key, value in values.items() if key != "version"}, "")
    for key, section in _SECTIONS.items():
        _check_whole(key, dataclasses.asdict(getattr(plan, key)), renewed(section, values[key]))
    return plan
