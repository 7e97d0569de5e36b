"""The configuration of a model that a config.json of Hugging Face's layout describes. No jax, no weights."""

from collections.abc import Mapping
from typing import Any

from paxtrain.config import Config, to_dict
from paxtrain.huggingface.conversion import from_config

SEQUENCE, TOKENS = 4096, 2**22  # tokens of a sample at most, and of a step


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
    fields = from_config(values, where)
    positions = values.get("max_position_embeddings", values.get("n_positions"))
    sequence = min(positions, SEQUENCE) if isinstance(positions, int) and positions > 0 else SEQUENCE
    found["model"] |= {**fields, "sequence": sequence}
    found["batch"]["global_batch"] = max(TOKENS // sequence, 1)
    return found
