"""Import: a model of transformers, saved as the checkpoint of step 0 of a new run."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxtrain import files
from paxtrain.config import Config, to_dict
from paxtrain.data.tokenizer import load
from paxtrain.errors import UserError
from paxtrain.huggingface import architectures
from paxtrain.huggingface.files import CONFIG, SETTINGS, ModelArrays, read_json, write_json
from paxtrain.run import checkpoint, checkpoint_reading, sampling


def _check_architecture(config: Config, fields: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Require that the configuration's model is the one whose `fields` the folder has."""
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


def _imported_settings(folder: pathlib.Path, values: Mapping[str, object]) -> dict[str, object]:
    """Return a model's tokenizer_config.json, with the tokens that its config.json gives only by id."""
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    tokenizer = load(folder / sampling.TOKENIZER)
    for name in ("bos_token", "eos_token"):
        number = values.get(f"{name}_id")
        text = tokenizer.id_to_token(number) if isinstance(number, int) else None
        if text is not None and not settings.get(name):
            settings[name] = text
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | settings


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
    if settings is not None:
        files.write(out / sampling.TOKENIZER, (folder / sampling.TOKENIZER).read_bytes())
        write_json(out / SETTINGS, settings)
    # Written last, so that a run with a checkpoint is complete, and an import that was interrupted can be repeated.
    with checkpoint.Checkpoints(home, config.checkpoint) as checkpoints:
        checkpoints.save(0, {"params": jax.tree.map(jnp.asarray, params)}, meta)
    return out
