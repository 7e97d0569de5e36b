"""Show where the seconds of a training step go: srun python -m paxtrain.profile --config=... [--plan=plan.json].

The program takes the flags of paxtrain.train, but needs neither data nor checkpoints. It runs a few steps from fresh
weights on random tokens, with the configuration's compression on. `paxtrain/profiling/breakdown.py` lists the parts.
With --ledger it compiles the step for an H100 that is not there and says what it computes, moves and sends.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from absl import flags
from jax.sharding import Mesh

from paxtrain import flags as shared_flags
from paxtrain.command_line import OVERRIDES, run
from paxtrain.config import Config
from paxtrain.errors import UserError
from paxtrain.outer.trainer import trainer_of
from paxtrain.parallel import compressed_stages
from paxtrain.parallel.compression import checks
from paxtrain.parallel.mesh import host_major, make_mesh
from paxtrain.process import distributed
from paxtrain.profiling import ledger
from paxtrain.profiling.breakdown import Breakdown, breakdown, by_stage, table
from paxtrain.run.prepared import require_memory

HINT = OVERRIDES


def profile(config: Config, mesh: Mesh, steps: int) -> Breakdown:
    """Return the breakdown of a configuration's step on this process's devices.

    Args:
        config: configuration of the step.
        mesh: mesh with the sizes of config.mesh.
        steps: number of steps to trace.
    """
    trainer = trainer_of(config, mesh)
    checks.check(trainer.compression)
    require_memory(trainer)
    state = trainer.init(config.run.seed)
    if config.compress.data.stages == "selective":
        chosen = compressed_stages.choose(trainer, state)[0].chosen()
        ranks = tuple(trainer.compression.level if s in chosen else 0 for s in range(config.mesh.pipe))
        trainer = dataclasses.replace(trainer, stage_ranks=ranks)
    shape, sharding = trainer.abstract_batch().shape, trainer.batch_sharding
    draw = functools.partial(jax.random.randint, shape=shape, minval=0, maxval=config.model.vocab_size)
    tokens, step = jax.jit(draw, out_shardings=sharding)(jax.random.key(0)), trainer.compile_step()
    distributed.wait_for_all("the step is compiled")

    def one() -> dict[str, jax.Array]:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics

    return breakdown(one, step, mesh, steps)


def define_flags() -> None:
    """Define this main's flags."""
    shared_flags.define_training()
    description = "Show what the step computes, moves and sends on an H100, from a program compiled without one."
    flags.DEFINE_bool("ledger", False, description)
    flags.DEFINE_integer("steps", 3, "Steps to trace.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    """Read the configuration, join the other processes, measure the step and print the table."""
    f = flags.FLAGS
    config, chosen = shared_flags.configured()
    if f.ledger:
        ledger.ledger(config)
        return
    shared_flags.join()
    mesh, problem = None, None
    try:
        devices = host_major(chosen.hosts, distributed.host_names()) if chosen and chosen.hosts else None
        mesh = make_mesh(config.mesh, chosen.device_order or None if chosen else None, devices)
    except UserError as error:
        problem = error
    distributed.agree(problem)
    assert mesh is not None
    found = profile(config, mesh, f.steps)
    seconds, hidden = by_stage(found, mesh)
    if jax.process_index() == 0:
        print(table(seconds, hidden))
        print(f"  {f.steps} steps of {found.total:.4f} s; without the profiler {found.untraced:.4f} s", flush=True)


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
