"""The nodes that a job got: their devices, and whether they share its folder, have a plan, and were profiled."""

import dataclasses
import pathlib
import secrets
import time
from collections.abc import Sequence

import jax

from paxtrain import files
from paxtrain.config import ModelConfig
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from paxtrain.run import checkpoint
from paxtrain.tables import some
from planner.cluster import cluster as clusters
from planner.cluster import cluster_file
from planner.cluster.cluster import Cluster
from planner.cost import compute
from planner.measure.machines import Machines
from planner.measure.process_group import ProcessGroup

_SHARED_WITHIN = 5.0  # seconds in which a file must be seen on all nodes: clients of NFS look again after some
_PAUSE = 0.2


# --- Devices ----------------------------------------------------------------------------------------------------------


def wrong_devices(devices: Sequence[jax.Device], gpus: int, host: str) -> str:
    """Return why these are not the devices that a process must find; empty if they are.

    Args:
        devices: devices that jax finds.
        gpus: GPUs that the process must find; 0: CPUs.
        host: name of this host.
    """
    found = [device.device_kind for device in devices if device.platform != "cpu"]
    if len(found) == gpus:
        return ""
    kinds = f"{len(found)} x {', '.join(dict.fromkeys(found))}"
    if not gpus:
        return (
            f"jax finds {kinds} on {host}, but --gpus=0 asks for CPUs; set JAX_PLATFORMS=cpu, or launch with a node's "
            "number of GPUs as --gpus_per_node"
        )
    if not found:
        return (
            f"jax finds no GPU on {host}, but --gpus={gpus} asks for {gpus}; install requirements-gpu.txt there, see "
            "that nvidia-smi lists them and JAX_PLATFORMS is not set, or launch with --gpus_per_node=0 to train on CPUs"
        )
    return (
        f"jax finds {kinds} on {host} for one process, but --gpus={gpus} asks for {gpus}; ask for nodes that have as "
        "many, or launch with a node's number of GPUs as --gpus_per_node"
    )


def check_devices(group: ProcessGroup, gpus: int, host: str) -> None:
    """End this process, and so the others, if its devices are not those that it must have.

    It does not wait for the others. If one process alone finds no GPU, jax's runtime holds up the others, which wait
    for its GPUs.

    Args:
        group: processes of the job.
        gpus: GPUs that each process must have; 0: CPUs.
        host: name of this host.

    Raises:
        UserError: the devices are wrong, and this process is alone.
    """
    problem = wrong_devices(jax.local_devices(), gpus, host)
    if problem and group.count > 1:
        group.fail(problem, lost=False)
    if problem:
        raise UserError(problem)


# --- The folder -------------------------------------------------------------------------------------------------------


def _seen(token: pathlib.Path, within: float) -> bool:
    """Return whether this process sees the file, with its name in it."""
    until = time.monotonic() + within
    while True:
        try:
            if token.read_text() == token.name:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE)


def check_shared(group: ProcessGroup, out: pathlib.Path, within: float = _SHARED_WITHIN) -> None:
    """Make the folder, and prove that all processes see the same one.

    Args:
        group: processes of the job.
        out: folder of the run.
        within: seconds until what process 0 writes must be seen.

    Raises:
        UserError: on every process: the folder cannot be written, or some do not see what process 0 wrote there.
    """

    def write(_: object) -> str:
        checkpoint.ensure_writable(out)
        token = out / f".shared-{secrets.token_hex(8)}"
        with files.writable(f"--out={out}", "name a folder that can be"):
            token.write_text(token.name)
        return token.name

    def verdict(values: list[bool]) -> None:
        blind = [name for name, seen in zip(group.names, values) if not seen]
        if blind:
            raise UserError(
                f"--out={out} is not the same folder on all nodes: what {group.names[0]} writes there is not seen on "
                f"{some(blind)}; name a folder on a file system that they share"
            )

    token = out / group.gather(None, write)
    try:
        group.gather(_seen(token, within), verdict)
    finally:
        if group.process == 0:
            token.unlink(missing_ok=True)


# --- Plans ------------------------------------------------------------------------------------------------------------


def why_not(plan: Plan, machines: Machines) -> str:
    """Return why a plan is not for these nodes ("pax4 is not in it"), in whatever order; empty if it is."""
    there, devices = len(machines.hosts) * machines.per_host, plan.mesh.devices
    reasons = []
    if plan.hosts:
        added = [host for host in machines.hosts if host not in plan.hosts]
        gone = [host for host in plan.hosts if host not in machines.hosts]
        reasons += [f"{some(added)} {'is' if len(added) == 1 else 'are'} not in it"] * bool(added)
        reasons += [f"{some(gone)} of it {'is' if len(gone) == 1 else 'are'} not here"] * bool(gone)
    elif devices != there:
        reasons.append(f"it is for {devices} devices, here are {there}")
    if not reasons and plan.devices_per_host not in (0, machines.per_host):
        reasons.append(f"it is for {plan.devices_per_host} devices on each host, here are {machines.per_host}")
    return ", and ".join(reasons)


# --- Profiles ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A profile that was kept, of these nodes alone and in their order.

    Attributes:
        cluster: measured cluster.
        path: file of the profile.
        hosts: number of hosts that were measured.
        measured: time of the measurement, in seconds since the epoch.
    """

    cluster: Cluster
    path: pathlib.Path
    hosts: int
    measured: float


def _fits(cluster: Cluster, machines: Machines, model: ModelConfig) -> bool:
    if not cluster.named or cluster.devices_per_host != machines.per_host or set(machines.hosts) - set(cluster.hosts):
        return False
    kinds = dict(zip(cluster.hosts, cluster.kinds))
    if any(kinds[host] != kind for host, kind in zip(machines.hosts, machines.kinds)):
        return False
    if cluster_file.site_numbers(clusters.of_hosts(cluster, machines.hosts).sites) != machines.site_numbers:
        return False  # what a site shares was not measured, or that of another one
    if not cluster.compute:
        return "cpu" not in machines.kinds  # which have no data sheet to go by
    return any(compute.profiled_row(row) == compute.profiled(model) for row in cluster.compute)


def kept_profile(folder: pathlib.Path, machines: Machines, model: ModelConfig, most: float) -> Kept | None:
    """Return the newest profile of these nodes, or of these and others; None if none is young enough.

    Args:
        folder: folder of the profiles.
        machines: nodes of the job.
        model: model that the profile must have measured.
        most: greatest age in seconds.
    """
    found = sorted(((path.stat().st_mtime, path) for path in folder.glob("*.json")), reverse=True)
    for measured, path in found:
        if time.time() - measured > most:
            return None
        try:
            cluster = Cluster.load(path)
        except UserError:  # cut off while it was written, or not a profile
            continue
        if _fits(cluster, machines, model):
            return Kept(clusters.of_hosts(cluster, machines.hosts), path, len(cluster.hosts), measured)
    return None


def keep_profile(cluster: Cluster, folder: pathlib.Path) -> pathlib.Path:
    """Write a profile into the folder, named by the time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / time.strftime("%Y%m%dT%H%M%SZ.json", time.gmtime())
    cluster.save(path)
    return path
