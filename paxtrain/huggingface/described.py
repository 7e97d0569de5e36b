"""The configuration of a model that a config.json of Hugging Face's layout describes. No jax, no weights."""

import re
from collections.abc import Mapping
from typing import Any

from paxtrain.config import Config, to_dict
from paxtrain.config.checks import Refusal
from paxtrain.errors import UserError
from paxtrain.huggingface.conversion import from_config

SEQUENCE, TOKENS = 4096, 2**22  # tokens of a sample at most, and of a step
# Their keys for the fields of ModelConfig that messages name.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
    "intermediate": ("intermediate_size", "n_inner"),
    "sequence": ("max_position_embeddings", "n_positions"),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "tied_head": ("tie_word_embeddings",),
    "rope_scaling": ("rope_scaling", "rope_parameters"),
}


def in_its_words(text: str, values: Mapping[str, Any]) -> str:
    """Return a message about a model's fields with the keys that its config.json has for them."""

    def theirs(found: re.Match[str]) -> str:
        keys = _KEYS.get(found[1], ())
        return next((key for key in (*keys, found[1]) if key in values), keys[0] if keys else found[0])

    return re.sub(r"\bmodel\.(\w+)", theirs, text)


def configuration(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the sections of the configuration: the model's shape is the file's, all else has its defaults.

    A sample has as many tokens as the model has positions, at most `SEQUENCE`, and a step about `TOKENS`.

    Args:
        values: content of the config.json.
        where: its name, for messages.

    Raises:
        UserError: the architecture is not implemented, or a value is missing or invalid.
    """
    found = to_dict(Config())
    try:
        fields = from_config(values, where)
    except Refusal as refusal:
        raise UserError(f"{where}: {in_its_words(str(refusal), values)}") from refusal
    positions = values.get("max_position_embeddings", values.get("n_positions"))
    sequence = min(positions, SEQUENCE) if isinstance(positions, int) and positions > 0 else SEQUENCE
    found["model"] |= {**fields, "sequence": sequence}
    found["batch"]["global_batch"] = max(TOKENS // sequence, 1)
    return found
