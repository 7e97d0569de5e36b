"""The manifest of a job on Kubernetes: a JobSet (jobset.x-k8s.io) of one indexed Job with a pod per node.

The pods' names are known in advance, so processes find each other without Kubernetes's API. When one pod fails, the
JobSet ends all of them and creates them again. Bad input (exit code 2) ends the JobSet.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml

from paxtrain.process.progress import STOPPED
from planner.jobs.job import GPU_VARIABLES, Job, shell

COORDINATOR = 9101  # port of process 0
# Seconds in which all pods must have started, while a node still pulls the image or is being provisioned. A waiting pod
# costs less than a restart of all pods, and restarts are limited by --max_restarts.
START_TIMEOUT = 86_400
# `source` and conda's scripts need bash, which not every image has. $0 is the script.
_SHELL = 'if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
_WORKER, _CONTAINER = "node", "train"


@dataclasses.dataclass(frozen=True)
class JobSetOptions:
    """Options of a job that only Kubernetes knows.

    Attributes:
        name: name of the JobSet, and the beginning of the pods' names.
        image: container image, with paxtrain in its working folder or installed.
        claim: persistent volume claim that holds the job's `out`.
        mount: path of the volume in the pods.
        setup: shell lines before everything else.
        rdma: number of each resource that gives a pod RDMA devices.
    """

    name: str
    image: str
    claim: str
    mount: str = "/data"
    setup: tuple[str, ...] = ()
    rdma: Mapping[str, int] = dataclasses.field(default_factory=dict)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes texts of several lines as blocks and indents lists below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent every list below its key."""
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def is_name(name: str) -> bool:
    """Return whether pods' names can begin with `name`: a DNS label, short enough for the rest of the name."""
    return re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) is not None and len(name) <= 40


def _host(name: str, pod: int) -> str:
    """Return a pod's name in the JobSet's network."""
    return f"{name}-{_WORKER}-0-{pod}.{name}"


def _command(job: Job, kubernetes: JobSetOptions) -> str:
    """Return the shell script that the container runs."""
    among = [f"--coordinator={_host(kubernetes.name, 0)}:{COORDINATOR}", f"--num_processes={job.nodes}"]
    # Pods come when their images are there; a pod that was stopped before the last step has not succeeded.
    among += [f"--coordinator_timeout={START_TIMEOUT}", f"--stopped_code={STOPPED}"]
    lines = [
        *kubernetes.setup,  # before `set -u`, because conda's scripts read unset variables
        "set -eu",
        # JOB_COMPLETION_INDEX is the pod's number in the Job, NODE_NAME the name of its machine.
        f"exec python {shell(job.run(*among), 2)} \\",
        '  --process_id="$JOB_COMPLETION_INDEX" --host_name="$NODE_NAME"',
    ]
    return "\n".join(lines) + "\n"


def _kept(text: str) -> str:
    """Return a text escaped for Kubernetes, which replaces $$ and $(NAME) in arguments and variables."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _container(job: Job, kubernetes: JobSetOptions) -> dict[str, Any]:
    """Return the container of each pod."""
    variables: list[dict[str, Any]] = [
        # The planner measures machines. After a restart, pods of the same name may be on other machines.
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": kubernetes.image,
        "command": ["/bin/sh", "-c", _SHELL],
        "args": [_kept(_command(job, kubernetes))],
        "env": variables,
        "ports": [{"containerPort": COORDINATOR, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "out", "mountPath": kubernetes.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if job.gpus_per_node:
        variables += [{"name": name, "value": value} for name, (value, _) in GPU_VARIABLES.items()]
        variables.append({"name": "JAX_COMPILATION_CACHE_DIR", "value": _kept(f"{job.out}/cache")})
        container["resources"] = {"limits": {"nvidia.com/gpu": str(job.gpus_per_node)}}
        if kubernetes.rdma:
            container["resources"]["limits"] |= {name: str(count) for name, count in kubernetes.rdma.items()}
            # RDMA registers memory, which is locked.
            container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    else:
        variables.append({"name": "JAX_PLATFORMS", "value": "cpu"})  # also where jax would find GPUs
    return container


def _apart(kubernetes: JobSetOptions) -> dict[str, Any]:
    """Return an affinity that gives each pod a separate node, because it uses all network and memory of the node."""
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": kubernetes.name}}  # the controller sets it on all pods
    term = {"labelSelector": own, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def manifest(job: Job, kubernetes: JobSetOptions) -> dict[str, Any]:
    """Return the JobSet as JSON values."""
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # the end of a pod ends the Job, and the JobSet decides what follows
        "terminationGracePeriodSeconds": job.signal_ahead,
        "affinity": _apart(kubernetes),
        "containers": [_container(job, kubernetes)],
        "volumes": [
            {"name": "out", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            # NCCL's transport between the GPUs of a node needs more than a container's default 64 MB.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if job.gpus_per_node:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    bad_input = {"containerName": _CONTAINER, "operator": "In", "values": [2]}
    template = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": bad_input}]},
        "template": {"spec": pod},
    }
    never_again = {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": kubernetes.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": kubernetes.name},
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                "restartStrategy": "BlockingRecreate",  # all pods of the previous start are gone before new ones begin
                "rules": [never_again],
            },
            "replicatedJobs": [{"name": _WORKER, "replicas": 1, "template": {"spec": template}}],
        },
    }


def text(job: Job, kubernetes: JobSetOptions) -> str:
    """Return the manifest as YAML."""
    head = "# Written by planner.launch; kubectl apply -f takes it where the JobSet controller is installed.\n"
    if job.gpus_per_node and job.nodes > 1 and not kubernetes.rdma:
        head += "# No RDMA resource was named with --rdma, so NCCL will use TCP between nodes.\n"
    return head + yaml.dump(manifest(job, kubernetes), Dumper=_Dumper, sort_keys=False, width=1000)
