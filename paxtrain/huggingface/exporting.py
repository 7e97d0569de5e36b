"""Export: a checkpoint of a run, written as a model of transformers."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
from huggingface_hub import split_state_dict_into_shards_factory
from tqdm import tqdm

from paxtrain import files
from paxtrain.config import from_dict
from paxtrain.data import settings
from paxtrain.data.tokenizer import END_OF_TEXT, load
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion
from paxtrain.huggingface.files import CONFIG, INDEX, ONE_FILE, write_json
from paxtrain.run import checkpoint, checkpoint_reading, sampling

DTYPES = ("float32", "bfloat16")
SHARD = "5GB"  # largest file, as in transformers


def _save(arrays: dict[str, np.ndarray], folder: pathlib.Path, dtype: str) -> None:
    """Write the arrays as one file, or as several with an index."""

    def size(x: np.ndarray) -> int:
        return x.size * jnp.dtype(dtype).itemsize

    split = split_state_dict_into_shards_factory(
        arrays, get_storage_size=size, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    for file, names in tqdm(split.filename_to_tensors.items(), desc="writing", disable=not split.is_sharded):
        some = {name: jnp.asarray(arrays[name], dtype) for name in names}
        with files.replacing(folder / file) as new:
            safetensors.flax.save_file(some, new, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)


def export(
    directory: str | pathlib.Path, out: str | pathlib.Path, *, step: int | None = None, dtype: str = "float32"
) -> None:
    """Write a run's checkpoint as a model of transformers, with the run's tokenizer if it has one.

    Args:
        directory: folder of the run.
        out: folder of the model, which must not hold one yet.
        step: step of the checkpoint; None: the newest good one.
        dtype: dtype of the saved arrays, one of DTYPES.

    Raises:
        UserError: there is no good checkpoint, or `out` holds a model or cannot be written.
    """
    folder = pathlib.Path(out)
    if (folder / CONFIG).exists() or (folder / ONE_FILE).exists():
        raise UserError(f"--out={out} holds a model already; name another folder, or empty it")
    meta = checkpoint_reading.read_meta(pathlib.Path(directory) / sampling.CHECKPOINTS, step)
    conversion.require_names(from_dict({"model": meta["config"]["model"]}).model)
    checkpoint.ensure_writable(folder)
    params, config = sampling.load_params(directory, step)
    _save(conversion.weights(jax.device_get(params), config.model), folder, dtype)
    run, vocabulary = pathlib.Path(directory), config.model.vocab_size
    # Some configurations have other usual ids, which need not be in the vocabulary.
    tokens: dict[str, object] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if (run / sampling.TOKENIZER).exists():
        tokenizer = load(run / sampling.TOKENIZER)
        ends = settings.ends(run, tokenizer, vocabulary)
        # Data that others prepared has no settings.
        found = settings.read(run) or (settings.of_data({}, None, END_OF_TEXT, True) if ends else dict(settings.CLASS))
        begin = tokenizer.token_to_id(settings.token(found, "bos_token") or "")
        generation = settings.read_object(run / settings.GENERATION) if (run / settings.GENERATION).exists() else {}
        pad = generation.get("pad_token_id")
        tokens = {
            "bos_token_id": begin if begin is not None and begin < vocabulary else None,
            "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
            "pad_token_id": pad if type(pad) is int and 0 <= pad < vocabulary else None,
        }
        files.write(folder / sampling.TOKENIZER, (run / sampling.TOKENIZER).read_bytes())
        # Chat templates spell special tokens, which are then ids, whatever the run's text was.
        kept = {name: value for name, value in found.items() if name != "split_special_tokens"}
        write_json(folder / settings.FILE, kept | {"model_max_length": config.model.sequence})
        if generation:
            write_json(folder / settings.GENERATION, generation | tokens)
    # Written last, so that a folder with this file is complete.
    write_json(folder / CONFIG, conversion.to_config(config.model, dtype) | tokens)
