"""Each dimension that the search tries wins somewhere, and `--explain` says what the plan without it would take."""

import dataclasses
import json
import re
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import plan as plans
from planner.search.space import COLUMNS, numbers_of
from tests.planner.examples import cluster

# What follows from other columns (the batch, data and micro_batch), and what the configuration decides.
NOT_SEARCHED = {"micro_batches", "reduce_dtype"}
SMALL = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000}
WIDE = {"layers": 8, "hidden": 1024, "heads": 16, "sequence": 512, "vocab_size": 8192, "dtype": "bfloat16"}
OPTIONS = planner.PlanOptions(
    memory_margin=False,
    top=1,
    placed=1,
    nearby=False,
    oracle="no",
    uneven=False,
    virtual_stages=(),
    schedules=("eager_1f1b",),
)
LOSES = (
    r"(takes [\d.e-]+ s at least, ([\d.]+% more|[\d.]+ times as long), by its lower bound|"
    r"simulated [\d.e-]+ s, ([\d.]+% more|[\d.]+ times as long)|does not fit, .*)"
)


class Case(NamedTuple):
    """A cluster and a model on which a value of a column wins.

    Attributes:
        wins: the column's value in the plan.
        loses: what the losing neighbor changes.
        options: options of the choice.
        model: values of the model. batch: sequences of a step.
        hosts: number of hosts. devices: of each. cluster: other values of the cluster's file.
        slower: factor by which links between hosts are slower than 200 Gbit/s.
    """

    wins: Any
    loses: str
    options: dict[str, Any]
    model: dict[str, Any] = SMALL
    batch: int = 32
    hosts: int = 1
    devices: int = 4
    slower: float = 1.0
    cluster: Mapping[str, Any] = types.MappingProxyType({})


KINDS = {"device": ["a100-80gb"] * 2 + ["v100"] * 2}
FOUR = {"model": WIDE, "hosts": 4, "devices": 1}
FAR = FOUR | {"slower": 100}
EPILOGUE = {"compress": ("epilogue",), "backward_ranks": (4, 16), "pipe": (4,)}
CHUNKS = {"schedules": ("interleaved_1f1b",), "virtual_stages": (2, 4), "pipe": (2,)}
LONG = {"others": (("context", (4,)),)}
NO_NVLINK = {"links": {"alpha": [[1e-5]], "bandwidth": [[12e9]]}}
SAVES = {"data": (4,), "micro_batch": (8,), "saves": ("residuals", "layer_inputs")}
CASES = {
    "data": Case(4, "data=2 pipe=2", {}),
    "pipe": Case(4, "data=2 pipe=2", {"saves": ("residuals",)}, **FAR),
    "tensor": Case(2, "pipe=1 tensor=4", {}, WIDE, batch=1),
    "micro_batch": Case(8, "micro_batch=4", {"data": (4,)}),
    "schedule": Case("eager_1f1b", "schedule=1f1b", {"schedules": ("eager_1f1b", "1f1b"), "pipe": (4,)}, **FAR),
    "chunks": Case(2, "chunks=4", CHUNKS, **FOUR | {"hosts": 2}),
    "save": Case("layer_inputs", "save=residuals", SAVES, WIDE, cluster={"memory": 1.9e9}),
    "shard": Case("weights", "shard=optimizer", {"data": (4,)}, WIDE),
    "shard_group": Case(4, "shard_group=0", {"data": (16,), "tensor": (1,)}, WIDE, batch=64, hosts=4, slower=10),
    "context_form": Case("heads", "context_form=ring", LONG, WIDE | {"sequence": 8192}, batch=1, cluster=NO_NVLINK),
    "sequence_parallel": Case(True, "sequence_parallel=False", {"tensor": (4,)}, WIDE),
    "backward": Case("epilogue", "backward=none", EPILOGUE, **FAR),
    "backward_rank": Case(4, "backward_rank=16", EPILOGUE, **FAR),
    "data_rank": Case(8, "data_rank=0", {"compress": ("data",), "data_ranks": (8,), "data": (4,)}, **FAR),
    "uneven_data": Case(True, "uneven_data=False", {"data": (4,), "micro_batch": (1,)}, **FOUR, cluster=KINDS),
}


def test_each_column_has_a_case_or_is_not_searched():
    assert set(CASES) | NOT_SEARCHED == set(COLUMNS) and not set(CASES) & NOT_SEARCHED


def planned(case: Case) -> planner.Plans:
    """Return the plans of a case, explained."""
    made = cluster(case.hosts, case.devices, seed=None, **case.cluster)
    inside = np.eye(case.hosts, dtype=bool)
    made = dataclasses.replace(made, samples=np.where(inside, made.samples, made.samples / case.slower))
    values = {f"model.{name}": value for name, value in case.model.items()} | {"batch.global_batch": case.batch}
    config = paxtrain.load_config("tiny", values | {"batch.micro_batch": 1, "mesh.data": 1})
    return planner.plan(config, made, dataclasses.replace(OPTIONS, **case.options), explained=True)


@pytest.mark.parametrize("column", CASES)
def test_a_dimension_wins_and_its_neighbor_loses(column):
    case = CASES[column]
    found = planned(case)
    chosen = numbers_of(found.ranked[0].candidate)[column]
    said = "\n".join([str(found.ranked[0].candidate), *found.explain()])
    assert COLUMNS[column].value(chosen) == case.wins, said
    assert any(re.fullmatch(rf"{case.loses}( \S+=\S+)*: {LOSES}", line) for line in found.explain()), said


def test_weights_in_shards_of_a_host_win_over_whole_ones_and_over_shards_of_all_ranks():
    found = planned(CASES["shard_group"])
    assert (found.plan.mesh.shard, found.plan.mesh.shard_group, found.plan.mesh.copies) == ("weights", 4, 4)
    assert plans.from_json(json.loads(json.dumps(plans.to_json(found.plan)))) == found.plan
    for other in ("shard_group=0", "shard=optimizer shard_group=0"):
        assert any(re.fullmatch(rf"{other}: {LOSES}", line) for line in found.explain()), found.explain()
    assert " weights/4 " in found.text() and "shard weights/8: " in found.text()
    assert "ZeRO-3 in groups of 4" in found.html()
