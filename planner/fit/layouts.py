"""The layouts that a trainer could run on a cluster, as rows of the table of runs, without seconds."""

import itertools

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.config.checks import divisors
from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster, between
from planner.cost.candidate import Candidate
from planner.runs.trials import COLUMNS, Trial, parse

_GBIT = 8e-9  # of a byte per second
_MOST_LAYOUTS = 400  # of one number of hosts; more are thinned out evenly


def _cells(cluster: Cluster, model: ModelConfig, trainer: str, hosts: int) -> dict[str, object]:
    """Return what all layouts on the first hosts of a cluster have in common."""
    apart, same = between(cluster)[:hosts, :hosts], np.eye(hosts, dtype=bool)
    rates = cluster.bandwidth[:hosts, :hosts]
    network = [float(rates[i][apart[i]].max()) * cluster.nics * _GBIT for i in range(hosts)] if hosts > 1 else []
    return {
        **{"cluster": cluster.name, "trainer": trainer, "devices_per_host": cluster.devices_per_host},
        **{"device_kinds": ";".join(cluster.kinds[:hosts]), "host_nics": cluster.nics},
        **{"host_gbit": ";".join(f"{rate:.6g}" for rate in network)},
        **{"intra_gbit": ";".join(f"{rate * _GBIT:.6g}" for rate in rates[same])},
        **{"device_gb": f"{float(cluster.memory[:hosts].min()) / 1e9:.6g}"},
        **{"family": model.family, "hidden": model.hidden, "heads": model.heads, "layers": model.layers},
        **{"kv_heads": model.key_value_heads, "ffn": model.ffn, "tied_head": int(model.tied_head)},
        **{"seq": model.sequence, "vocab": model.vocab_size, "recompute": "none"},
        **{"dtype": "bf16" if model.dtype == "bfloat16" else "fp32"},
    }


def run_of(cluster: Cluster, model: ModelConfig, trainer: str, plan: Candidate, global_batch: int) -> Trial:
    """Return a plan on all hosts of a cluster as a row without seconds.

    Args:
        cluster: the cluster.
        model: a model of a family that the table knows.
        trainer: who is to run it, one of planner/runs/trainers.py.
        plan: the plan.
        global_batch: sequences of a step.
    """
    row = {
        **_cells(cluster, model, trainer, len(cluster.hosts)),
        **{"devices": plan.data * plan.pipe * plan.tensor, "tp": plan.tensor, "pp": plan.pipe, "dp": plan.data},
        **{"global_batch": global_batch, "micro_batch": plan.micro_batch, "schedule": plan.schedule},
        **{"sharding": "zero1" if plan.zero1 else "none", "sequence_parallel": int(plan.sequence_parallel)},
        **{"stage_layers": ";".join(map(str, plan.stage_map.by_stage(plan.counts).sum(axis=0).tolist()))},
        **{"virtual_stages": plan.chunks, "recompute": "none" if plan.save == "residuals" else "full"},
    }
    return parse({name: str(row.get(name, "")) for name in COLUMNS})


def layouts(cluster: Cluster, model: ModelConfig, trainer: str, hosts: int, global_batch: int) -> list[Trial]:
    """Return the layouts of a model on the first hosts of a cluster.

    Args:
        cluster: the cluster; a tensor group stays inside a host.
        model: a model of a family that the table knows.
        trainer: who is to run it, one of planner/runs/trainers.py.
        hosts: number of hosts.
        global_batch: sequences of a step.

    Raises:
        UserError: the table does not know the model, or no layout divides it.
    """
    if model.module:
        raise UserError(f"model.module={model.module} has no column in the table of runs; plan it by planner.plan")
    devices, common, found = hosts * cluster.devices_per_host, _cells(cluster, model, trainer, hosts), []
    for tensor in divisors(cluster.devices_per_host, model.key_value_heads):
        if model.key_value_heads % tensor:
            continue
        for pipe, sharding in itertools.product(divisors(devices // tensor, model.layers), ("none", "zero1")):
            data = devices // (tensor * pipe)
            if global_batch % data or (data == 1 and sharding == "zero1"):
                continue
            for size in divisors(global_batch // data, global_batch):
                row = {
                    **common,
                    **{"devices": devices, "tp": tensor, "pp": pipe, "dp": data, "global_batch": global_batch},
                    **{"micro_batch": size, "sharding": sharding, "sequence_parallel": int(tensor > 1)},
                }
                found.append(parse({name: str(row.get(name, "")) for name in COLUMNS}))
    if not found:
        raise UserError(
            f"no layout of {devices} devices divides {model.layers} layers, {model.key_value_heads} heads of keys and "
            f"a batch of {global_batch}; a batch that is a multiple of the devices would do"
        )
    keep = np.unique(np.linspace(0, len(found) - 1, _MOST_LAYOUTS).astype(int))
    return [found[i] for i in keep]
