"""Export of checkpoints to Hugging Face's layout: config.json, *.safetensors and tokenizer.json.

    python -m paxtrain.huggingface export --checkpoint=runs/tiny --out=runs/tiny_hf

An exported model loads with transformers' AutoModelForCausalLM and AutoTokenizer. In the other direction, a run of
paxtrain.train begins with the weights of --config.init=FOLDER.
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import run
from paxtrain.errors import UserError, command
from paxtrain.huggingface.exporting import DTYPES, export
from paxtrain.run import sampling

_EXPORT = "paxtrain.huggingface export"


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("checkpoint", None, "Directory of a training run (its run.out).")
    flags.DEFINE_integer("step", None, "Step of the checkpoint; the newest good one if not given.")
    flags.DEFINE_string("out", None, "Folder to write.")
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Dtype of the arrays.")


def main(argv: Sequence[str]) -> None:
    """Export, as the first argument says."""
    f, what = flags.FLAGS, list(argv[1:])
    if what != ["export"]:
        given = f"got {' '.join(map(repr, what))}" if what else "got nothing"
        instead = "; a model is read by paxtrain.train --config.init=FOLDER" if what[:1] == ["import"] else ""
        raise UserError(f"say export, once: {command(_EXPORT)} --checkpoint=...; {given}{instead}")
    if missing := [name for name in ("checkpoint", "out") if f[name].value is None]:
        raise UserError(f"export needs --{missing[0]}; {command(_EXPORT)} --help lists the flags")
    export(f.checkpoint, f.out, step=f.step, dtype=f.dtype)
    known = (pathlib.Path(f.out) / sampling.TOKENIZER).exists()
    print(f"wrote {f.out}" + ("" if known else f", without a tokenizer, since {f.checkpoint} has none"))


if __name__ == "__main__":
    run(main, define_flags)
