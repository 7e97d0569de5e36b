"""Export and import of models in Hugging Face's layout: config.json, *.safetensors and tokenizer.json.

    python -m paxtrain.huggingface export --checkpoint=runs/tiny --out=runs/tiny_hf
    python -m paxtrain.huggingface import --model=FOLDER --config=configs/gpt2_125m.py --config.run.out=runs/finetuned

An exported model loads with transformers' AutoModelForCausalLM and AutoTokenizer. An imported model becomes the
checkpoint of step 0 in run.out: paxtrain.train with the same configuration continues from it.
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import define_config, run
from paxtrain.config import from_dict
from paxtrain.errors import UserError
from paxtrain.huggingface.exporting import DTYPES, export
from paxtrain.huggingface.importing import import_model
from paxtrain.run import sampling

_FLAGS = {"export": ("checkpoint", "step", "out", "dtype"), "import": ("model", "config")}
_INSTEAD = {"out": "; a run's folder is --config.run.out"}


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("checkpoint", None, "export: directory of a training run (its run.out).")
    flags.DEFINE_integer("step", None, "export: step of the checkpoint; the newest good one if not given.")
    flags.DEFINE_string("out", None, "export: folder to write.")
    flags.DEFINE_enum("dtype", "float32", DTYPES, "export: of the arrays.")
    flags.DEFINE_string("model", None, "import: folder of a model in Hugging Face's layout.")
    define_config("config", None, "import: the configuration to train with.")
    # A file that could not be loaded raises when it is first used: here, while flags are parsed.
    flags.register_validator(
        "config", lambda config: config is None or hasattr(config, "items"), "get_config() must return a ConfigDict"
    )


def main(argv: Sequence[str]) -> None:
    """Export or import, as the first argument says."""
    f, what = flags.FLAGS, argv[1] if len(argv) == 2 else ""
    needed = {"export": ("checkpoint", "out"), "import": ("model", "config")}
    if what not in needed:
        given = f"got {' '.join(map(repr, argv[1:]))}" if argv[1:] else "got nothing"
        raise UserError(f"say export or import, once: python -m paxtrain.huggingface export --checkpoint=...; {given}")
    other = next(name for name in _FLAGS if name != what)
    if foreign := [name for name in _FLAGS[other] if f[name].present]:
        raise UserError(f"--{foreign[0]} is for {other}, not for {what}{_INSTEAD.get(foreign[0], '')}")
    missing = [name for name in needed[what] if f[name].value is None]
    if missing:
        raise UserError(f"{what} needs --{missing[0]}; python -m paxtrain.huggingface --help lists the flags")
    if what == "export":
        export(f.checkpoint, f.out, step=f.step, dtype=f.dtype)
        known = (pathlib.Path(f.out) / sampling.TOKENIZER).exists()
        print(f"wrote {f.out}" + ("" if known else f", without a tokenizer, since {f.checkpoint} has none"))
        return
    out = import_model(f.model, from_dict(f.config))
    print(
        f"wrote step 0 to {out / sampling.CHECKPOINTS}; python -m paxtrain.train with the same --config goes on from it"
    )


if __name__ == "__main__":
    run(main, define_flags)
