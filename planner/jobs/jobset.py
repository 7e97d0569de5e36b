"""The manifest of a job on Kubernetes: a JobSet (jobset.x-k8s.io) of one indexed Job with a pod per node.

The pods' names are known beforehand, so that the processes need no access to Kubernetes's API to find each other. A
fault ends all pods, as the supervisors see to, and the JobSet makes them anew; bad input (exit code 2) ends it.
"""

import dataclasses
import re
from typing import Any

import yaml

from planner.jobs.job import GPU_VARIABLES, Job, shell
from planner.supervision.peer_connections import PORT

COORDINATOR = 9101  # port of process 0
# Seconds in which all pods must have started: one node still pulls the image, or is only being bought. A pod that waits
# costs less than a start of all pods, of which there are --max_restarts.
START_TIMEOUT = 86_400
# `source` and what conda writes want bash, which not every image has. $0 is the script.
_SHELL = 'if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
_WORKER, _CONTAINER = "node", "train"


@dataclasses.dataclass(frozen=True)
class Kubernetes:
    """What is Kubernetes's own of a job.

    Attributes:
        name: of the JobSet, and the beginning of the pods' names.
        image: of the container, with paxtrain in its working folder or installed.
        claim: the persistent volume claim that holds the job's `out`. mount: where the pods see it.
        setup: shell lines before all else.
    """

    name: str
    image: str
    claim: str
    mount: str = "/data"
    setup: tuple[str, ...] = ()


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are, and lists set in from their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def is_name(name: str) -> bool:
    """Whether it can begin the pods' names: a DNS label, short enough for what follows it."""
    return re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) is not None and len(name) <= 40


def _host(name: str, pod: int) -> str:
    """A pod's name in the JobSet's network."""
    return f"{name}-{_WORKER}-0-{pod}.{name}"


def _command(job: Job, kubernetes: Kubernetes) -> str:
    """What the container runs."""
    hosts = ",".join(_host(kubernetes.name, pod) for pod in range(job.nodes))
    among = [f"--coordinator={_host(kubernetes.name, 0)}:{COORDINATOR}", f"--num_processes={job.nodes}"]
    watch = job.supervise(
        f"--hosts={hosts}", f"--port={PORT}", f"--logs={job.logs}", f"--start_timeout={START_TIMEOUT}"
    )
    lines = [
        *kubernetes.setup,  # before `set -u`: conda's scripts read what is not set
        "set -eu",
        # JOB_COMPLETION_INDEX is the pod's number in the Job, NODE_NAME the machine it is on.
        f'exec python {shell(watch, 2)} --host="$JOB_COMPLETION_INDEX" --name="$NODE_NAME" -- \\',
        f"  python {shell(job.run(*among), 2)} \\",
        '  --process_id="$JOB_COMPLETION_INDEX" --host_name="$NODE_NAME"',
    ]
    return "\n".join(lines) + "\n"


def _kept(text: str) -> str:
    """A text as Kubernetes leaves it: in arguments and variables it takes $$ for $, and $(NAME) for a variable."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _container(job: Job, kubernetes: Kubernetes) -> dict[str, Any]:
    variables: list[dict[str, Any]] = [
        # The planner measures machines, and pods have the same names on other machines after a restart.
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    container = {
        "name": _CONTAINER,
        "image": kubernetes.image,
        "command": ["/bin/sh", "-c", _SHELL],
        "args": [_kept(_command(job, kubernetes))],
        "env": variables,
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in (PORT, COORDINATOR)],
        "volumeMounts": [
            {"name": "out", "mountPath": kubernetes.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if job.gpus_per_node:
        variables += [{"name": name, "value": value} for name, (value, _) in GPU_VARIABLES.items()]
        variables.append({"name": "JAX_COMPILATION_CACHE_DIR", "value": _kept(f"{job.out}/cache")})
        container["resources"] = {"limits": {"nvidia.com/gpu": str(job.gpus_per_node)}}
    else:
        variables.append({"name": "JAX_PLATFORMS", "value": "cpu"})  # also where jax would find GPUs
    return container


def _apart(kubernetes: Kubernetes) -> dict[str, Any]:
    """Affinity that keeps two of the pods from one node: each counts on all of its node's network and memory."""
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": kubernetes.name}}  # which the controller gives all pods
    term = {"labelSelector": own, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def manifest(job: Job, kubernetes: Kubernetes) -> dict[str, Any]:
    """The JobSet as JSON values."""
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # a pod that ends ends the Job, and the JobSet decides
        "terminationGracePeriodSeconds": job.signal_ahead,
        "affinity": _apart(kubernetes),
        "containers": [_container(job, kubernetes)],
        "volumes": [
            {"name": "out", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            # NCCL's transport between the GPUs of a node takes more than the 64 MB that containers have.
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
                "restartStrategy": "BlockingRecreate",  # no pod of a start meets one of the start before
                "rules": [never_again],
            },
            "replicatedJobs": [{"name": _WORKER, "replicas": 1, "template": {"spec": template}}],
        },
    }


def text(job: Job, kubernetes: Kubernetes) -> str:
    """The manifest as YAML."""
    head = "# Written by planner.launch; kubectl apply -f takes it where the JobSet controller is installed.\n"
    return head + yaml.dump(manifest(job, kubernetes), Dumper=_Dumper, sort_keys=False, width=1000)
