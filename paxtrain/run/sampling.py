"""Text sampled from the checkpoints of a training run."""

import dataclasses
import functools
import pathlib
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from paxtrain.config import Config, ModelConfig, from_dict
from paxtrain.data import settings
from paxtrain.data.tokenizer import FILE as TOKENIZER
from paxtrain.data.tokenizer import around, encoded, errors_of_library
from paxtrain.data.tokenizer import load as load_tokenizer
from paxtrain.errors import UserError
from paxtrain.model import parameters, transformer
from paxtrain.model.transformer import Params
from paxtrain.run import checkpoint_reading

CHECKPOINTS = "checkpoints"


def architecture(config: ModelConfig) -> dict[str, str | int | float]:
    """Return the settings that two checkpoints must share so that their arrays have the same meaning."""
    free = {"dtype", "attention", "separator", "embedding_dropout", "residual_dropout", "rope_theta", "rope_scaling"}
    if not any("positions" in p.own for p in parameters.table(config)):  # rotary positions have no end
        free.add("sequence")
    values = dataclasses.asdict(config) | {"kv_heads": config.key_value_heads, "intermediate": config.ffn}
    values["head_size"] = 0 if config.heads * config.head_dim == config.hidden else config.head_dim
    known = parameters.architecture(config)
    kept = known.options.keys() - known.reach
    values["options"] = {
        name: value for name in sorted(kept) if (value := known.option(config, name)) != known.options[name]
    }
    later = ("module", "head_size", "options")  # which checkpoints of older versions do not name
    return {name: value for name, value in values.items() if name not in free and (name not in later or value)}


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _next(
    params: Params,
    window: jax.Array,
    length: jax.Array,
    config: ModelConfig,
    temperature: float,
    top_k: int,
    key: jax.Array,
) -> jax.Array:
    """Return the next token after the first `length` tokens of window [1, S]; the tokens after them have no effect."""
    logits = transformer.logits(params, window, config)[0, length - 1]
    if temperature == 0:
        return logits.argmax()
    if top_k:
        logits = jnp.where(logits < jax.lax.top_k(logits, min(top_k, logits.size))[0][-1], -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)


def generate(
    params: Params,
    config: ModelConfig,
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    ends: Collection[int] = (),
) -> list[int]:
    """Return token ids that continue a prompt, sampled from the plain model on one device.

    Each token attends to the last `config.sequence` tokens. Keys and values are not cached.

    Args:
        params: Canonical parameters.
        config: Model of the parameters.
        prompt: Token ids, at least one.
        tokens: Most tokens to sample.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to sample from; 0: all.
        seed: Seed of the samples.
        ends: Token ids that end the text; the first of them that is sampled is not returned.
    """
    ids, key = list(prompt), jax.random.key(seed)
    for i in range(tokens):
        recent = ids[-config.sequence :]
        window = np.zeros((1, config.sequence), np.int32)
        window[0, : len(recent)] = recent
        drawn = _next(params, window, np.int32(len(recent)), config, temperature, top_k, jax.random.fold_in(key, i))
        if int(drawn) in ends:
            break
        ids.append(int(drawn))
    return ids[len(prompt) :]


def load_params(directory: str | pathlib.Path, step: int | None = None) -> tuple[Params, Config]:
    """Return parameters (on this process's first device) and the model's configuration of a run.

    The tokenizer takes special tokens that a text spells as the run's data did.

    Args:
        directory: Folder of the run.
        step: Step of the checkpoint; None: the newest good one.

    Raises:
        UserError: The directory has no good checkpoint.
    """
    home = pathlib.Path(directory) / CHECKPOINTS
    # Only the model: other sections may name files that are no longer there, such as a schedule's.
    config = from_dict({"model": checkpoint_reading.read_meta(home, step)["config"]["model"]})
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), transformer.shapes(config.model)
    )
    params, _ = checkpoint_reading.restore_params(home, abstract, architecture(config.model), step)
    return params, config


def load(directory: str | pathlib.Path, step: int | None = None) -> tuple[Params, Config, Tokenizer]:
    """Return what `load_params` returns, and the tokenizer of a run.

    Raises:
        UserError: The directory has no good checkpoint, or no tokenizer.
    """
    params, config = load_params(directory, step)
    path = pathlib.Path(directory) / TOKENIZER
    if not path.exists():
        raise UserError(f"there is no {path}; copy the tokenizer.json of the training data there")
    tokenizer = load_tokenizer(path)
    tokenizer.encode_special_tokens = bool(settings.read(pathlib.Path(directory)).get("split_special_tokens"))
    return params, config, tokenizer


def printable(text: str) -> str:
    """Return a text with control characters but newlines and tabs as escapes, since a terminal would obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def sample(
    directory: str | pathlib.Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """Return text that continues a prompt, sampled from a checkpoint of a run; it ends where the document does.

    Args:
        directory: Folder of the run.
        prompt: Text to continue, at least one token.
        tokens: Most tokens to sample.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to sample from; 0: all.
        seed: Seed of the samples.
        step: Step of the checkpoint; None: the newest good one.

    Raises:
        UserError: There is no good checkpoint, no tokenizer that fits it, or the prompt has no token.
    """
    params, config, tokenizer = load(directory, step)
    message = f"the tokenizer {pathlib.Path(directory) / TOKENIZER} cannot encode --prompt"
    [encoding] = encoded(tokenizer, [prompt], message)
    ids = around(tokenizer)[0] + encoding.ids
    if not ids:
        raise UserError(f"--prompt must hold at least one token, got {prompt!r}")
    config_model = dataclasses.replace(config.model, embedding_dropout=0.0, residual_dropout=0.0, attention="auto")
    if max(ids) >= config.model.vocab_size:
        raise UserError(
            f"the tokenizer beside the checkpoint gives id {max(ids)}, but the model has {config.model.vocab_size}; "
            "put the training data's tokenizer.json there"
        )
    ends = settings.ends(pathlib.Path(directory), tokenizer, config.model.vocab_size)
    drawn = generate(params, config_model, ids, tokens, temperature=temperature, top_k=top_k, seed=seed, ends=ends)
    with errors_of_library(f"the tokenizer {pathlib.Path(directory) / TOKENIZER} cannot decode {len(drawn)} ids"):
        # Some decoders drop a space at the beginning of a text, so the drawn ids are decoded behind the prompt's.
        before, whole, alone = (tokenizer.decode(some, False) for some in (ids, ids + drawn, drawn))
    return whole.removeprefix(before) if whole.startswith(before) else alone
