"""Export and import of models in Hugging Face's layout: config.json, *.safetensors and tokenizer.json.

    python -m paxtrain.huggingface export --checkpoint=runs/tiny --out=runs/tiny_hf
    python -m paxtrain.huggingface import --model=FOLDER --config=configs/gpt2_125m.py --config.run.out=runs/finetuned

An exported model loads with transformers' AutoModelForCausalLM and AutoTokenizer. An imported model becomes the
checkpoint of step 0 in run.out: paxtrain.train with the same configuration continues from it.
"""

import json
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from absl import flags
from huggingface_hub import split_state_dict_into_shards_factory
from tokenizers import Tokenizer
from tqdm import tqdm

from paxtrain import flags as shared_flags
from paxtrain.config import Config, from_dict, to_dict
from paxtrain.data.tokenizer import END_OF_TEXT, load
from paxtrain.errors import UserError, run
from paxtrain.huggingface import architectures
from paxtrain.run import checkpoint, sampling

CONFIG, ONE_FILE = "config.json", "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
SHARD = "5GB"  # largest file, as in transformers
SETTINGS = "tokenizer_config.json"  # beside tokenizer.json; an import keeps it for an export
# Arrays besides the weights in old files: masks, and angles that follow from rope_theta.
_NO_WEIGHTS = re.compile(r".*(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


# --- Export -----------------------------------------------------------------------------------------------------------


def _save(arrays: dict[str, np.ndarray], folder: pathlib.Path, dtype: str) -> None:
    """Write the arrays as one file, or as several with an index."""
    size = lambda x: x.size * jnp.dtype(dtype).itemsize  # noqa: E731
    split = split_state_dict_into_shards_factory(
        arrays, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    for file, names in tqdm(split.filename_to_tensors.items(), desc="writing", disable=not split.is_sharded):
        some = {name: jnp.asarray(arrays[name], dtype) for name in names}
        safetensors.flax.save_file(some, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _special(settings: dict[str, Any], name: str, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that settings name, as text or as an object with its content."""
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _settings(run: pathlib.Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenizer_config.json of a run: an imported model's, or that of paxtrain.prepare's tokenizers."""
    if (run / SETTINGS).exists():
        return _read_json(run / SETTINGS)
    known = tokenizer.token_to_id(END_OF_TEXT) is not None
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT) if known else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}


def export(directory: str, step: int | None, out: str, dtype: str) -> None:
    """Write a run's checkpoint as a model of transformers.

    Args:
        directory: folder of the run.
        step: step of the checkpoint; None: the newest good one.
        out: folder of the model, which must not hold one yet.
        dtype: dtype of the saved arrays, "float32" or "bfloat16".

    Raises:
        UserError: there is no good checkpoint, or `out` holds a model or cannot be written.
    """
    folder = pathlib.Path(out)
    if (folder / CONFIG).exists() or (folder / ONE_FILE).exists():
        raise UserError(f"--out={out} holds a model already; name another folder, or empty it")
    checkpoint.read_meta(pathlib.Path(directory) / sampling.CHECKPOINTS, step)
    checkpoint.ensure_writable(folder)
    params, config, tokenizer = sampling.load(directory, step)
    _save(architectures.weights(jax.device_get(params), config.model), folder, dtype)
    settings = _settings(pathlib.Path(directory), tokenizer) | {"model_max_length": config.model.sequence}
    begin, end = (_special(settings, name, tokenizer) for name in ("bos_token", "eos_token"))
    tokenizer.save(str(folder / sampling.TOKENIZER))
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    values = architectures.to_config(config.model, dtype, begin=begin, end=end)
    # Written last, so that a folder with this file is complete.
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


# --- Import -----------------------------------------------------------------------------------------------------------


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"there is no {path}; --model names a folder with {CONFIG} and *.safetensors") from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); --model names a folder with {CONFIG} and *.safetensors"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold an object, got {type(values).__name__}")
    return values


class _Arrays:
    """The arrays of a model by name; files are memory-mapped, and read when an array is asked for."""

    def __init__(self, folder: pathlib.Path) -> None:
        if (folder / INDEX).exists():
            places = _read_json(folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise UserError(f"{folder / INDEX} must have a weight_map from names to files")
            files = sorted(set(places.values()))
        else:
            files = [ONE_FILE]
        self._folder, self._holder, self._read = folder, {}, set()
        for file in files:
            try:
                opened = safetensors.safe_open(folder / file, framework="flax")
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(
                    f"{folder / file} cannot be read ({' '.join(str(error).split())}); --model needs all of a model's "
                    "*.safetensors"
                ) from error
            self._holder |= dict.fromkeys(opened.keys(), opened)

    def __call__(self, name: str) -> np.ndarray:
        # Files of a model without its head, such as the original GPT-2 files, lack the names' first part.
        for key in (name, name.partition(".")[2]):
            if key in self._holder:
                self._read.add(key)
                return np.asarray(self._holder[key].get_tensor(key))
        raise UserError(f"{self._folder} has no array {name}; its *.safetensors are of another model than its {CONFIG}")

    def check_all_read(self, tied_head: bool) -> None:
        """Require that no array is left over, such as quantized scales, which this architecture does not have."""
        tied = {"lm_head.weight"} if tied_head else set()  # the embedding again
        left = sorted(key for key in self._holder.keys() - self._read - tied if not _NO_WEIGHTS.fullmatch(key))
        if left:
            raise UserError(
                f"{self._folder} has arrays that its {CONFIG} does not account for, {left[0]} first of {len(left)}; "
                "models with biases of their own or quantised ones cannot be imported"
            )


def _check_architecture(config: Config, fields: dict[str, Any], folder: pathlib.Path) -> None:
    mine, theirs = dict(sampling.architecture(config.model)), dict(fields)
    for name, zero in (("kv_heads", theirs["heads"]), ("intermediate", 4 * theirs["hidden"])):
        theirs[name] = theirs[name] or zero
    different = {name: value for name, value in theirs.items() if mine[name] != value}
    if different:
        options = " ".join(f"--config.model.{name}={value}" for name, value in different.items())
        raise UserError(
            f"{folder} is another model than --config describes, which has "
            f"{', '.join(f'{name}={mine[name]}' for name in different)}; add {options}"
        )


def import_model(source: str, config: Config) -> pathlib.Path:
    """Save a model of transformers as the checkpoint of step 0 of a new run, and return the run's folder.

    Raises:
        UserError: the architecture is not implemented or not the configuration's, arrays are missing or have other
            shapes, or the run already has checkpoints.
    """
    folder, out = pathlib.Path(source), pathlib.Path(config.run.out)
    home = out / sampling.CHECKPOINTS
    values = _read_json(folder / CONFIG)
    fields = architectures.from_config(values, str(folder / CONFIG))
    _check_architecture(config, fields, folder)
    if home.exists() and any(home.iterdir()):
        raise UserError(f"{home} holds checkpoints already; name another folder with --config.run.out")
    arrays = _Arrays(folder)
    settings = _imported_settings(folder, values) if (folder / sampling.TOKENIZER).exists() else None
    made = not out.exists()
    checkpoint.ensure_writable(out)
    try:
        params = architectures.params(arrays, config.model)
        arrays.check_all_read(config.model.tied_head)
    except UserError:
        if made:
            out.rmdir()
        raise
    meta = {
        "step": 0,
        "samples": 0,
        "model": sampling.architecture(config.model),
        "data": None,
        "config": to_dict(config),
        "jax": jax.__version__,
    }
    with checkpoint.Checkpoints(home, config.checkpoint) as checkpoints:
        checkpoints.save(0, {"params": jax.tree.map(jnp.asarray, params)}, meta)
    if settings is not None:
        shutil.copyfile(folder / sampling.TOKENIZER, out / sampling.TOKENIZER)
        (out / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    return out


def _imported_settings(folder: pathlib.Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return a model's tokenizer_config.json, with the tokens that its config.json gives only by id."""
    settings = _read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    tokenizer = load(folder / sampling.TOKENIZER)
    for name in ("bos_token", "eos_token"):
        number = values.get(f"{name}_id")
        text = tokenizer.id_to_token(number) if isinstance(number, int) else None
        if text is not None and not settings.get(name):
            settings[name] = text
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | settings


# --- Main -------------------------------------------------------------------------------------------------------------

_FLAGS = {"export": ("checkpoint", "step", "out", "dtype"), "import": ("model", "config")}
_INSTEAD = {"out": "; a run's folder is --config.run.out"}


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("checkpoint", None, "export: directory of a training run (its run.out).")
    flags.DEFINE_integer("step", None, "export: step of the checkpoint; the newest good one if not given.")
    flags.DEFINE_string("out", None, "export: folder to write.")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "export: of the arrays.")
    flags.DEFINE_string("model", None, "import: folder of a model in Hugging Face's layout.")
    shared_flags.define_config("config", None, "import: the configuration to train with.")
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
        export(f.checkpoint, f.step, f.out, f.dtype)
        print(f"wrote {f.out}")
        return
    out = import_model(f.model, from_dict(f.config))
    print(
        f"wrote step 0 to {out / sampling.CHECKPOINTS}; python -m paxtrain.train with the same --config goes on from it"
    )


if __name__ == "__main__":
    run(main, define_flags)
