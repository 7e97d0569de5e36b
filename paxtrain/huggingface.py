"""Models from and to Hugging Face's layout, a folder of config.json, *.safetensors and tokenizer.json.

    python -m paxtrain.huggingface export --checkpoint=runs/tiny --out=runs/tiny_hf
    python -m paxtrain.huggingface import --model=FOLDER --config=configs/gpt2_125m.py --config.run.out=runs/finetuned

What is exported loads with transformers' AutoModelForCausalLM and AutoTokenizer. What is imported becomes the
checkpoint of step 0 in run.out: paxtrain.train with the same configuration goes on from it.
"""

import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from absl import flags
from huggingface_hub import split_state_dict_into_shards_factory
from ml_collections import config_flags
from tqdm import tqdm

from paxtrain import checkpoint, huggingface_model, sample
from paxtrain.config import Config, from_dict, to_dict
from paxtrain.errors import UserError, run
from paxtrain.tokenizer import END_OF_TEXT

CONFIG, ONE_FILE = "config.json", "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
SHARD = "5GB"  # at most in one file, as transformers' own


# --- Export -----------------------------------------------------------------------------------------------------------


def _save(arrays: dict[str, np.ndarray], folder: pathlib.Path, dtype: str) -> None:
    """Writes one file, or several and their index."""
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


def export(directory: str, step: int | None, out: str, dtype: str) -> None:
    """Writes a run's checkpoint as a model of transformers.

    Args:
        directory: of the run. step: of the checkpoint; None: the newest good one.
        out: a folder, which must not hold a model.
        dtype: of the saved arrays, "float32" or "bfloat16".

    Raises:
        UserError: there is no good checkpoint, or `out` holds a model.
    """
    folder = pathlib.Path(out)
    if (folder / CONFIG).exists() or (folder / ONE_FILE).exists():
        raise UserError(f"--out={out} holds a model already; name another folder, or empty it")
    params, config, tokenizer = sample.load(directory, step)
    folder.mkdir(parents=True, exist_ok=True)
    _save(huggingface_model.weights(jax.device_get(params), config.model), folder, dtype)
    end = tokenizer.token_to_id(END_OF_TEXT)
    values = huggingface_model.to_config(config.model, dtype, end)
    tokenizer.save(str(folder / sample.TOKENIZER))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.model.sequence}
    if end is not None:
        settings |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    # Last, so that a folder with it is whole.
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


# --- Import -----------------------------------------------------------------------------------------------------------


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"there is no {path}; --model names a folder with {CONFIG} and *.safetensors") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold an object, got {type(values).__name__}")
    return values


def _reader(folder: pathlib.Path) -> Callable[[str], np.ndarray]:
    """Gives the array of a name; files are mapped, and read when an array is asked for."""
    if (folder / INDEX).exists():
        files = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
    else:
        files = [ONE_FILE]
    holder = {}
    for file in files:
        try:
            opened = safetensors.safe_open(folder / file, framework="flax")
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(
                f"{folder / file} cannot be read ({' '.join(str(error).split())}); --model needs all of a model's "
                "*.safetensors"
            ) from error
        holder |= dict.fromkeys(opened.keys(), opened)

    def read(name: str) -> np.ndarray:
        # Files of the model without its head, as GPT-2's first ones, lack the names' first part.
        for key in (name, name.partition(".")[2]):
            if key in holder:
                return np.asarray(holder[key].get_tensor(key))
        raise UserError(f"{folder} has no array {name}; its *.safetensors are of another model than its {CONFIG}")

    return read


def _check_architecture(config: Config, fields: dict[str, Any], folder: pathlib.Path) -> None:
    mine, theirs = dict(sample.architecture(config.model)), dict(fields)
    for name, zero in (("kv_heads", config.model.heads), ("intermediate", 4 * config.model.hidden)):
        theirs[name] = theirs[name] or zero
    different = {name: value for name, value in theirs.items() if mine[name] != value}
    if different:
        options = " ".join(f"--config.model.{name}={value}" for name, value in different.items())
        raise UserError(
            f"{folder} is another model than --config describes, which has "
            f"{', '.join(f'{name}={mine[name]}' for name in different)}; add {options}"
        )


def import_model(source: str, config: Config) -> pathlib.Path:
    """Makes a model of transformers the checkpoint of step 0 of a run that is to come; returns the run's folder.

    Raises:
        UserError: another architecture than the configuration's or than any that is implemented, arrays that are
            missing or of other shapes, or a run that has checkpoints.
    """
    folder, out = pathlib.Path(source), pathlib.Path(config.run.out)
    home = out / sample.CHECKPOINTS
    fields = huggingface_model.from_config(_read_json(folder / CONFIG), str(folder / CONFIG))
    _check_architecture(config, fields, folder)
    if home.exists() and any(home.iterdir()):
        raise UserError(f"{home} holds checkpoints already; name another folder with --config.run.out")
    params = huggingface_model.params(_reader(folder), config.model)
    meta = {
        "step": 0,
        "samples": 0,
        "model": sample.architecture(config.model),
        "data": None,
        "config": to_dict(config),
        "jax": jax.__version__,
    }
    with checkpoint.Checkpoints(home, config.checkpoint) as checkpoints:
        checkpoints.save(0, {"params": jax.tree.map(jnp.asarray, params)}, meta)
    if (folder / sample.TOKENIZER).exists():
        shutil.copyfile(folder / sample.TOKENIZER, out / sample.TOKENIZER)
    return out


# --- Main -------------------------------------------------------------------------------------------------------------


def define_flags() -> None:
    """Defines this main's flags."""
    flags.DEFINE_string("checkpoint", None, "export: directory of a training run (its run.out).")
    flags.DEFINE_integer("step", None, "export: step of the checkpoint; the newest good one if not given.")
    flags.DEFINE_string("out", None, "export: folder to write.")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "export: of the arrays.")
    flags.DEFINE_string("model", None, "import: folder of a model in Hugging Face's layout.")
    config_flags.DEFINE_config_file(
        "config", None, "import: the configuration to train with.", lock_config=False, accept_new_attributes=True
    )


def main(argv: Sequence[str]) -> None:
    """Exports or imports."""
    f, what = flags.FLAGS, argv[1] if len(argv) == 2 else ""
    needed = {"export": ("checkpoint", "out"), "import": ("model", "config")}
    if what not in needed:
        given = f"got {' '.join(map(repr, argv[1:]))}" if argv[1:] else "got nothing"
        raise UserError(f"say export or import, once: python -m paxtrain.huggingface export --checkpoint=...; {given}")
    missing = [name for name in needed[what] if f[name].value is None]
    if missing:
        raise UserError(f"{what} needs --{missing[0]}; python -m paxtrain.huggingface --help lists the flags")
    if what == "export":
        export(f.checkpoint, f.step, f.out, f.dtype)
        print(f"wrote {f.out}")
        return
    out = import_model(f.model, from_dict(f.config))
    print(
        f"wrote step 0 to {out / sample.CHECKPOINTS}; python -m paxtrain.train with the same --config goes on from it"
    )


if __name__ == "__main__":
    run(main, define_flags)
