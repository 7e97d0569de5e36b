"""Import: a model of transformers, saved as the checkpoint of step 0 of a new run."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxtrain import files
from paxtrain.config import Config, to_dict
from paxtrain.data import settings
from paxtrain.data.tokenizer import load
from paxtrain.errors import UserError
from paxtrain.huggingface import architectures
from paxtrain.huggingface.files import CONFIG, ModelArrays, read_json, write_json
from paxtrain.model import parameters
from paxtrain.run import checkpoint, checkpoint_reading, sampling


def _check_architecture(config: Config, fields: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Require that the configuration's model is the one whose `fields` the folder has."""
    mine, theirs = dataclasses.asdict(config.model) | sampling.architecture(config.model), dict(fields)
    usual = parameters.architecture(config.model).options if mine["family"] == theirs["family"] else {}
    for name, known in (("options", usual), ("rope_scaling", {})):
        own, other = mine.pop(name, {}), theirs.pop(name, {})
        mine |= {f"{name}.{key}": own.get(key, known.get(key)) for key in (*own, *other)}
        theirs |= {f"{name}.{key}": other.get(key, known.get(key)) for key in (*own, *other)}
    if mine["vocab_size"] > theirs["vocab_size"]:  # tokens that were added; the tables get rows
        del theirs["vocab_size"]
    if mine["sequence"] < theirs.get("sequence", 0):  # the first positions are the same
        del theirs["sequence"]
    for name, zero in (("kv_heads", theirs["heads"]), ("intermediate", 4 * theirs["hidden"])):
        theirs[name] = theirs[name] or zero
    different = {name: value for name, value in theirs.items() if mine[name] != value}
    if different:
        options = " ".join(f"--config.model.{name}={value}" for name, value in different.items())
        raise UserError(
            f"{folder} is another model than --config describes, which has "
            f"{', '.join(f'{name}={mine[name]}' for name in different)}; add {options}"
        )


_SPECIAL = ("bos_token", "eos_token")


def _keep_special(folder: pathlib.Path, values: Mapping[str, Any], out: pathlib.Path) -> None:
    """Keep a model's tokenizer and what it says of its special tokens for sampling and an export.

    Its config.json may give tokens only by id, and several that end a text.
    """
    kept, tokenizer = settings.read(folder), load(folder / sampling.TOKENIZER)
    ids = {f"{name}_id": values[f"{name}_id"] for name in _SPECIAL if values.get(f"{name}_id") is not None}
    for name in _SPECIAL:
        number = ids.get(f"{name}_id")
        number = number[0] if isinstance(number, list) and number else number
        text = None
        if isinstance(number, int) and number < values["vocab_size"]:
            text = tokenizer.id_to_token(number)
        if text is not None and not kept.get(name):
            kept[name] = text
    generation = folder / settings.GENERATION
    ids |= settings.read_object(generation) if generation.exists() else {}
    files.write(out / sampling.TOKENIZER, (folder / sampling.TOKENIZER).read_bytes())
    write_json(out / settings.FILE, settings.CLASS | kept)
    write_json(out / settings.GENERATION, ids)


def import_model(source: str | pathlib.Path, config: Config) -> pathlib.Path:
    """Save a model of transformers as the checkpoint of step 0 of a new run, and return the run's folder.

    Args:
        source: folder of the model.
        config: configuration of the run; its model must be the one in the folder.

    Raises:
        UserError: the architecture is not implemented or not the configuration's, arrays are missing or have other
            shapes, or the run already has checkpoints.
    """
    folder, out = pathlib.Path(source), pathlib.Path(config.run.out)
    home = out / sampling.CHECKPOINTS
    values = read_json(folder / CONFIG)
    fields = architectures.from_config(values, str(folder / CONFIG))
    _check_architecture(config, fields, folder)
    if checkpoint_reading.finished_steps(home):
        raise UserError(f"{home} holds checkpoints already; name another folder with --config.run.out")
    arrays = ModelArrays(folder)
    made = not out.exists()
    checkpoint.ensure_writable(out)
    try:
        params = architectures.params(arrays, config.model, values["vocab_size"], values.get("n_positions", 0))
        arrays.check_all_read(config.model.tied_head)
        if (folder / sampling.TOKENIZER).exists():
            _keep_special(folder, values, out)
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
    # Written last, so that a run with a checkpoint is complete, and an import that was interrupted can be repeated.
    with checkpoint.Checkpoints(home, config.checkpoint) as checkpoints:
        checkpoints.save(0, {"params": jax.tree.map(jnp.asarray, params)}, meta)
    return out
