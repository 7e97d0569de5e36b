"""Write a plan for another trainer: python -m planner.export --to=megatron --plan=runs/plan/plan.json --model=gpt_8b.

It writes the trainer's flags, the layers of each stage and the order of the ranks to --out, and says how to start it
and what it does otherwise than the plan. --model must be the configuration that the plan was made for.
"""

import pathlib
from collections.abc import Callable, Sequence

from absl import flags

from paxtrain import files
from paxtrain.command_line import define_config, run
from paxtrain.config import plan as plans
from paxtrain.errors import UserError
from planner.export import maxtext, megatron, torchtitan
from planner.export.exported import Exported, expected

EXPORTERS: dict[str, Callable[..., Exported]] = {
    "megatron": megatron.export,
    "torchtitan": torchtitan.export,
    "maxtext": maxtext.export,
}
HINT = "name the trainer with --to=megatron, torchtitan or maxtext"


def main(argv: Sequence[str]) -> None:
    """Read the plan and the model, and write the files of the other trainer."""
    f = flags.FLAGS
    if f.to is None:
        raise UserError(f"--to is missing; name a trainer, one of {', '.join(EXPORTERS)}")
    plan = plans.load(f.plan)
    config = plan.apply(f.model.to_dict())
    found, out = EXPORTERS[f.to](plan, config.model, config.stage_layers), pathlib.Path(f.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in found.files.items():
            files.write(out / name, text)
    except OSError as error:
        raise UserError(f"cannot write to --out={out} ({error}); name a folder that can be written") from error
    print(f"for     {found.version}")
    print(f"wrote   {', '.join(str(out / name) for name in found.files)}")
    print(f"start   {found.command}")
    if (seconds := expected(plan, found.schedule)) is not None:
        print(f"expect  {seconds:.4g} s a step of {found.schedule}, if ops begin as soon as their messages are there")
    for words in found.inexpressible:
        print(f"cannot  {words}")


def define_flags() -> None:
    """Define the flags of this main."""
    flags.DEFINE_enum("to", None, list(EXPORTERS), "The trainer to write for.")
    flags.DEFINE_string("plan", "runs/plan/plan.json", "The plan, as planner.plan writes it.")
    define_config("model", "gpt_8b", "The configuration that the plan was made for.")
    flags.DEFINE_string("out", "runs/export", "The folder to write to.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
