"""The step of several processes on CPUs: its program has no reduce-scatter, which gloo adds up wrongly now and then."""

import json

import pytest

from tests.compress_settings import nested
from tests.processes import run_processes

# Prints the kinds of collectives that each program has. The last one is what must not be there. All processes have the
# same programs, so each compiles half of them.
KINDS = """
import json
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from paxtrain.config import from_dict
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from tests.paxtrain.xla import counted

OPTIONS = {"xla_backend_optimization_level": 0}
found = []
for values in json.loads(sys.argv[1])[jax.process_index() :: 2]:
    config = from_dict(values)
    trainer = Trainer(config, make_mesh(config.mesh))
    lowered = trainer.step.lower(trainer.abstract_state(), trainer.abstract_batch())
    found.append(sorted(counted.collective_bytes(lowered.compile(OPTIONS).as_text())))
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spec = PartitionSpec("data")
scatter = jax.shard_map(lambda x: lax.psum_scatter(x, "data", tiled=True), mesh=mesh, in_specs=spec, out_specs=spec)
lowered = jax.jit(scatter).lower(jax.ShapeDtypeStruct((64,), np.float32))
found.append(sorted(counted.collective_bytes(lowered.compile(OPTIONS).as_text())))
print(json.dumps(found))
"""


def values(mesh, shard="optimizer", optimizer=None, **compress):
    data, pipe, tensor = mesh
    model = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab_size": 64, "vocab_multiple": 64}
    return {
        "model": model | {"dtype": "float32"},
        "mesh": {"data": data, "pipe": pipe, "tensor": tensor, "shard": shard, "sequence_parallel": tensor > 1},
        "batch": {"global_batch": 2 * data, "micro_batch": 1},
        "optimizer": optimizer or {},
        "compress": nested(compress),
    }


EVERYTHING = {
    "backward_messages": "all",
    "backward_rank": 2,
    "data_stages": "all",
    "data_rank": 2,
    "data_rank_min": 2,
}


@pytest.mark.once
@pytest.mark.parametrize(
    "configurations",
    [
        [values((2, 2, 2)), values((4, 2, 1), shard="none", **EVERYTHING)],
        pytest.param(
            [values((4, 1, 2), optimizer={"name": "muon"}), values((4, 2, 1), data_codec="int8", data_inside=2)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sequence parallel and low rank", "muon and groups of ranks"],
)
def test_no_program_of_several_processes_has_a_reduce_scatter(configurations):
    for output in run_processes(KINDS, json.dumps(configurations)):
        *programs, control = json.loads(output.splitlines()[-1])
        assert len(programs) == len(configurations) / 2
        for kinds in programs:
            assert "all-to-all" in kinds and "all-reduce" in kinds and "reduce-scatter" not in kinds
        assert control == ["reduce-scatter"]
