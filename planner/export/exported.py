"""An export of a plan for another trainer, and the order of its ranks.

A plan's `device_order` has a device for each position of the mesh, counted over data, pipe and tensor. Other trainers
count their ranks in an order of their own, and launchers put ranks on hosts. If the ranks of each host follow each
other, a list of the hosts is enough (a hostfile). Otherwise each rank is named with its host (a rankfile of Open MPI),
and a script tells the trainer its rank, which trainers do not ask Open MPI for.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.config.axes import MAIN, in_words
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from paxtrain.model.parameters import architecture

# Numbers of Llama 3's positions that are constants in trainers that take no others.
USUAL_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
_RANK = """# Run a command as the rank that Open MPI started, on its device in ranks.csv: sh rank.sh COMMAND...
table=$(dirname "$0")/ranks.csv
export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"
export LOCAL_RANK="$(awk -F, -v rank="$RANK" '$1 == rank { print $3 }' "$table")"
export MASTER_ADDR="${MASTER_ADDR:-$(awk -F, '$1 == 0 { print $2 }' "$table")}" MASTER_PORT="${MASTER_PORT:-29500}"
# The same as MaxText asks for it.
export JAX_COORDINATOR_IP="$MASTER_ADDR" JAX_COORDINATOR_PORT="$MASTER_PORT"
export NNODES="$WORLD_SIZE" NODE_RANK="$RANK" SLURM_STEP_GPUS="$LOCAL_RANK"
exec "$@"
"""


@dataclasses.dataclass(frozen=True)
class Exported:
    """The files that are written for another trainer.

    Attributes:
        version: the trainer and the version whose parser takes it.
        files: text of each file, by name.
        command: how the trainer is started with them.
        schedule: name of the schedule that it runs; "" if this project has none like it.
        inexpressible: sentences on what the trainer does otherwise than the plan.
    """

    version: str
    files: dict[str, str]
    command: str
    schedule: str
    inexpressible: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class MeshRanks:
    """The ranks of a trainer: of each its position in the mesh and its device.

    Attributes:
        axes: names of the axes that are counted, in the order of the mesh.
        positions: [ranks, axes] of the mesh.
        host: [ranks] number of the host.
        device: [ranks] number of the device in the host.
        names: names of the hosts.
        per_host: devices of a host.
    """

    axes: tuple[str, ...]
    positions: np.ndarray
    host: np.ndarray
    device: np.ndarray
    names: tuple[str, ...]
    per_host: int

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return len(self.host) // self.per_host

    @property
    def first(self) -> str:
        """Name of the host of rank 0."""
        return self.names[self.host[0]]

    @property
    def follow(self) -> bool:
        """Return whether the ranks of each host follow each other, a host's devices at a time."""
        return bool((self.host.reshape(-1, self.per_host) == self.host[:: self.per_host, None]).all())

    def files(self) -> dict[str, str]:
        """Return the table of all ranks, and a hostfile, or a rankfile with a script for each rank, by name."""
        rows = [
            f"{rank},{self.names[host]},{device},{','.join(map(str, position))}"
            for rank, (host, device, position) in enumerate(zip(self.host, self.device, self.positions.tolist()))
        ]
        table = "\n".join([",".join(("rank", "host", "device", *self.axes)), *rows]) + "\n"
        if self.follow:
            hosts = [f"{self.names[host]} slots={self.per_host}\n" for host in self.host[:: self.per_host]]
            return {"ranks.csv": table, "hostfile": "".join(hosts)}
        slots = [f"rank {n}={self.names[h]} slot={d}\n" for n, (h, d) in enumerate(zip(self.host, self.device))]
        return {"ranks.csv": table, "rankfile": "".join(slots), "rank.sh": _RANK}

    def mpirun(self, program: str) -> str:
        """Return the command that starts a program by the rankfile."""
        return f"mpirun -n {len(self.host)} --rankfile rankfile sh rank.sh {program}"

    def torchrun(self, program: str, variables: str = "") -> str:
        """Return the command that starts a program of PyTorch as all ranks.

        Args:
            program: what follows `python`.
            variables: variables of its environment, "NAME=value".
        """
        if not self.follow:
            return self.mpirun(" ".join([*(["env", variables] if variables else []), "python", program]))
        where = f"--nproc_per_node={self.per_host} --nnodes={self.nodes} --node_rank=N --master_addr={self.first}"
        command = " ".join([*([variables] if variables else []), "torchrun", where, program])
        return f"{command}, on each host; N is its line in hostfile, from 0 on"


def _made_up(count: int) -> tuple[str, ...]:
    """Return names for the hosts of a plan that names none, as reports on such clusters have them."""
    return tuple(f"host{n:0{len(str(count - 1))}}" for n in range(count))


def mesh_ranks(plan: Plan, order: Sequence[str]) -> MeshRanks:
    """Return the ranks of a plan.

    Args:
        plan: the plan.
        order: axes in the order in which a trainer counts ranks, slowest first; of those besides data, pipe and tensor
            the ones with several devices count.

    Raises:
        UserError: the plan does not say how many devices a host has, or has several of an axis that is not among them.
    """
    if not plan.devices_per_host:
        raise UserError(
            "the plan has devices_per_host=0, so its ranks have no hosts; plan anew, or write the number into the plan"
        )
    mesh, axes, shape = plan.mesh, list(plan.mesh.sizes), tuple(plan.mesh.sizes.values())
    order = [axis for axis in order if axis in MAIN or mesh.sizes[axis] > 1]
    devices = np.array(plan.device_order or range(mesh.devices)).reshape(shape)
    index, others = np.indices(shape), [axis for axis in axes if axis not in order]
    if several := {axis: mesh.sizes[axis] for axis in others if mesh.sizes[axis] > 1}:
        raise UserError(f"other trainers do not have the plan's {in_words(several)}; a plan with 1 there would fit")
    turned = [axes.index(axis) for axis in (*order, *others)]
    flat = devices.transpose(turned).ravel()
    per_host = plan.devices_per_host
    names = plan.hosts or _made_up(mesh.devices // per_host)
    counted = tuple(axis for axis in axes if axis in order)
    positions = np.stack([index[axes.index(axis)].transpose(turned).ravel() for axis in counted], axis=1)
    return MeshRanks(counted, positions, flat // per_host, flat % per_host, names, per_host)


def best_order(plan: Plan, orders: Mapping[str, Sequence[str]]) -> tuple[str, MeshRanks]:
    """Return the first of some orders in which a host's ranks follow each other, or the first if none is so.

    Args:
        plan: the plan.
        orders: orders of the axes, slowest first, by what chooses them.
    """
    found = [(flag, mesh_ranks(plan, order)) for flag, order in orders.items()]
    return next((one for one in found if one[1].follow), found[0])


def runs(counts: Sequence[int], write: Callable[[int, int], str]) -> str:
    """Return equal neighbors of `counts` as `write(value, times)` of each run of them."""
    return "".join(write(value, len(list(group))) for value, group in itertools.groupby(counts))


def expected(plan: Plan, schedule: str) -> float | None:
    """Return the predicted seconds of a step whose ops begin as soon as their messages are there.

    Args:
        plan: the plan.
        schedule: schedule that the trainer runs.

    Returns:
        None if the plan does not say it for this schedule.
    """
    seconds = plan.predicted.get("ideal_step_seconds")
    return seconds.get(schedule) if isinstance(seconds, dict) else None


def cannot(trainer: str, what: str, fits: str) -> UserError:
    """Return the error of a value that a trainer cannot be told of.

    Args:
        trainer: its name.
        what: the value.
        fits: what would work.
    """
    return UserError(f"{trainer} cannot be told of {what}; {fits} would work")


def require_known(trainer: str, model: ModelConfig, families: Sequence[str], positions: Sequence[str]) -> None:
    """Require a model that a trainer can be told of.

    Args:
        trainer: its name.
        model: the model.
        families: families that it has.
        positions: its types of rope_scaling.

    Raises:
        UserError: it cannot.
    """
    kind, scaling = model.rope_scaling.get("rope_type", "default"), dict(model.rope_scaling)
    for wrong, what, fits in (
        (model.module, f"model.module={model.module}", f"the families {', '.join(families)}"),
        (model.family not in families, f"model.family={model.family}", f"the families {', '.join(families)}"),
        (kind not in positions, f"model.rope_scaling={scaling}", f"the types {', '.join(positions)}"),
    ):
        if wrong:
            raise cannot(trainer, what, fits)


def require_llama3(trainer: str, model: ModelConfig) -> None:
    """Require the numbers of Llama 3.1's positions, of models that have such.

    Args:
        trainer: name of a trainer that has them as constants.
        model: the model.

    Raises:
        UserError: another one.
    """
    for name, usual in {"factor": 8, **USUAL_LLAMA3}.items():
        if (found := model.rope_scaling[name]) != usual:
            raise cannot(trainer, f"model.rope_scaling.{name}={found}", str(usual))


def option(model: ModelConfig, name: str, without: float) -> float:
    """Return an option of the model's architecture, or what its absence means."""
    one = architecture(model)
    return one.option(model, name) if name in one.options else without


def require_all_seen(trainer: str, model: ModelConfig) -> None:
    """Require that each token sees all before it, with positions on the whole of a head.

    Args:
        trainer: name of a trainer that has nothing else for the model's family.
        model: the model.

    Raises:
        UserError: it has a window, or heads that turn in part.
    """
    for name, usual in {"sliding_window": 0, "partial_rotary_factor": 1.0}.items():
        if (found := option(model, name, usual)) != usual:
            raise cannot(trainer, f"model.options.{name}={found}", str(usual))


def common(plan: Plan, model: ModelConfig) -> list[str]:
    """Return what no other trainer does: sentences about the plan's batch, compression and placement, and the model."""
    found = []
    if plan.batch.data_micro_batches:
        found.append(
            f"all data ranks get as many micro-batches, not {plan.batch.data_micro_batches}, so the step takes longer "
            "than the plan says; --uneven_data=no plans for that"
        )
    if plan.outer:
        found.append(
            f"the {plan.outer.groups} groups, which train apart for {plan.outer.every} steps, train together, so the "
            "step takes longer than the plan says; a plan without outer.every would fit"
        )
    if plan.compress.backward.chosen != "none" or plan.compress.data.chosen != "none":
        found.append("compressed messages stay uncompressed, so the step takes longer than the plan says")
    if padding := model.padded_vocab - model.vocab_size:
        found.append(f"the {padding} rows that pad the vocabulary to {model.padded_vocab} take part in the softmax")
    if not plan.hosts:
        made_up = ", ".join(_made_up(plan.mesh.devices // plan.devices_per_host)[:2])
        found.append(f"the plan names no hosts, so {made_up} and so on stand for them; write yours in their place")
    return found
