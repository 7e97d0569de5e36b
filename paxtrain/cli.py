"""The console script: `paxtrain COMMAND ...` runs `python -m paxtrain.COMMAND ...`."""

import runpy
import sys
from collections.abc import Mapping

from paxtrain.command_line import ends_with_its_reader, fail, run
from paxtrain.errors import UserError

# (module, arguments in front of the given ones, description for --help)
Command = tuple[str, tuple[str, ...], str]
COMMANDS: dict[str, Command] = {
    "prepare": ("paxtrain.prepare", (), "turn text into token files"),
    "train": ("paxtrain.train", (), "train a model"),
    "sample": ("paxtrain.sample", (), "sample text from a checkpoint"),
    "export": ("paxtrain.huggingface", ("export",), "write a checkpoint in Hugging Face's layout"),
    "profile": ("paxtrain.profile", (), "show where the seconds of a training step go"),
    "check": ("paxtrain.testing", (), "check that a model of your own can be trained"),
    "study": ("paxtrain.study", (), "compare training with different compression"),
    "compare": ("paxtrain.compare", (), "draw the losses of runs beside each other"),
}


def run_command(program: str, commands: Mapping[str, Command]) -> None:
    """Run the command that the first argument names, as `python -m` runs its module.

    Args:
        program: name of the console script.
        commands: commands by name.
    """
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in ("--help", "-h", "help"):
        width = max(map(len, commands))
        lines = (f"  {command:<{width}}  {what}" for command, (_, _, what) in commands.items())
        with ends_with_its_reader():
            print("\n".join([f"usage: {program} COMMAND --flag=value ...", *lines]))
            print(f"`{program} COMMAND --help` lists a command's flags.")
        return
    if name not in commands:
        given = f"got {name!r}" if name else "got none"
        fail(UserError(f"a command is needed, {given}; there are {', '.join(commands)}"))
    module, more, _ = commands[name]
    # It is not imported, since a function of the package may have its name, such as planner.plan.
    found = runpy.run_module(module, run_name=module)
    run(found["main"], found.get("define_flags", lambda: None), found.get("HINT"), [f"{program} {name}", *more, *rest])


def main() -> None:
    """Run `paxtrain COMMAND`."""
    run_command("paxtrain", COMMANDS)
