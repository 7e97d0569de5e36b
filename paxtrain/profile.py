"""Shows where the seconds of a training step go: srun python -m paxtrain.profile --config=... [--plan=plan.json].

Takes the flags of paxtrain.train, but neither data nor checkpoints: it runs a few steps from fresh weights on random
tokens, with compression on where the configuration has it. `paxtrain/profiling/breakdown.py` says what the parts are.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence

import jax
from absl import flags
from jax.sharding import Mesh

from paxtrain import train
from paxtrain.config import Config, from_dict, plan
from paxtrain.errors import UserError, run
from paxtrain.parallel import selective
from paxtrain.parallel.mesh import cpu_devices, host_major, make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.process import distributed
from paxtrain.profiling.breakdown import Breakdown, breakdown, by_stage, table


def profile(config: Config, mesh: Mesh, steps: int) -> Breakdown:
    """The breakdown of a configuration's step on this process's devices."""
    trainer = Trainer(config, mesh)
    trainer.compression.check()
    state = trainer.init(config.run.seed)
    if config.compress.data == "selective":
        chosen = selective.choose(trainer, state)[0].chosen()
        ranks = tuple(config.compress.data_rank if s in chosen else 0 for s in range(config.mesh.pipe))
        trainer = dataclasses.replace(trainer, stage_ranks=ranks)
    shape, sharding = trainer.abstract_batch().shape, trainer.batch_sharding
    draw = functools.partial(jax.random.randint, shape=shape, minval=0, maxval=config.model.vocab_size)
    tokens, step = jax.jit(draw, out_shardings=sharding)(jax.random.key(0)), trainer.compile_step()

    def one() -> dict[str, jax.Array]:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics

    return breakdown(one, step, mesh, steps)


def define_flags() -> None:
    """Defines this main's flags."""
    train.define_flags()
    flags.DEFINE_integer("steps", 3, "Steps to trace.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    """Reads the configuration, joins the other processes, measures and prints."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; overrides are written --config.section.key=value")
    f = flags.FLAGS
    chosen = plan.load(f.plan) if f.plan else None
    config = chosen.apply(f.config) if chosen else from_dict(f.config)
    processes = f.num_processes or distributed.expected_processes(os.environ)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices or cpu_devices(config.mesh, processes))
    distributed.initialize(f.coordinator, f.num_processes, f.process_id, f.coordinator_timeout)
    mesh, problem = None, None
    try:
        devices = host_major(chosen.hosts, distributed.host_names()) if chosen and chosen.hosts else None
        mesh = make_mesh(config.mesh, chosen.device_order or None if chosen else None, devices)
    except UserError as error:
        problem = error
    distributed.agree(problem)
    found = profile(config, mesh, f.steps)
    seconds, hidden = by_stage(found, mesh)
    if jax.process_index() == 0:
        print(table(seconds, hidden))
        print(f"  {f.steps} steps of {found.total:.4f} s; without the profiler {found.untraced:.4f} s", flush=True)


if __name__ == "__main__":
    run(main, define_flags)
