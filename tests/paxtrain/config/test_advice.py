"""Whoever follows the advice of refusals is accepted, whichever advice it is and whatever else was set."""

import random
import re

import pytest

from paxtrain.config import from_dict
from paxtrain.config.load import nested
from paxtrain.errors import UserError


def advised(message: str) -> list[dict[str, object]]:
    """Return the changes that a refusal's last part advises, each by dotted names."""
    subject, _, advice = message.rpartition("; ")
    about = "model.heads" if "heads would" in advice else subject.partition("=")[0]
    changes = []
    advice = re.sub(r" or more| heads|,? would (fit|work)", "", advice.replace("tensor=", "mesh.tensor="))
    for way in re.split(r",? or (?=[a-z])", advice):
        first, *others = ([*re.findall(r"[a-z_]+\.[a-z_]+", part), about][0] for part in way.split(" with "))
        values = [re.findall(r"\b(\d+|True|False)\b", part) for part in way.split(" with ")]
        parsed = [[x == "True" if x.isalpha() else int(x) for x in some] for some in values]
        changes += [{first: x} | dict(zip(others, (some[0] for some in parsed[1:]))) for x in parsed[0]]
    assert changes, message
    return changes


def refusal(values: dict) -> str:
    try:
        from_dict(nested(values))
    except UserError as error:
        return str(error)
    return ""


def steps_to_fit(values: dict, most: int = 3) -> None:
    """Follow all advice of a refusal; require that each way is accepted after at most `most` changes."""
    message = refusal(values)
    if not message:
        return
    assert most, f"still refused after three changes: {message}, {values}"
    for change in advised(message):
        steps_to_fit(values | change, most - 1)


CASES = {
    "heads of a prime": {"model.hidden": 1600, "model.heads": 25, "model.vocab_size": 50257},
    "keys": {"model.family": "llama", "model.hidden": 1600, "model.heads": 30, "model.kv_heads": 6},
    "odd heads": {"model.family": "llama", "model.hidden": 105, "model.heads": 7},
    "sequence": {"mesh.sequence_parallel": True, "model.sequence": 127, "model.heads": 3, "model.hidden": 96},
    "fragments": {"outer.every": 12, "outer.fragments": 5, "outer.overlap": 2, "run.steps": 100, "mesh.data": 4},
    "long overlap": {"outer.every": 7, "outer.fragments": 7, "run.steps": 100, "model.layers": 4, "mesh.data": 4},
    "warm-up": {"outer.every": 7, "run.steps": 14, "optimizer.warmup_steps": 16, "mesh.data": 4},
    "groups": {"outer.every": 10, "outer.groups": 3, "mesh.data": 8, "run.steps": 40},
}


@pytest.mark.parametrize("name", CASES)
def test_who_follows_an_advice_is_accepted(name):
    for tensor in (1, 2, 4, 5, 6, 7, 25) if name != "sequence" else (2, 3, 4, 5):
        steps_to_fit({"model.layers": 8, "batch.global_batch": 64, "mesh.tensor": tensor} | CASES[name])


def test_so_is_who_follows_it_from_anywhere():
    """Configurations drawn from sizes that divide each other rarely."""
    draw = random.Random(0)
    sizes = {
        "model.family": ("gpt2", "llama"), "model.hidden": (96, 105, 1600, 130), "model.heads": (3, 4, 5, 25),
        "model.kv_heads": (0, 1, 2, 5), "model.vocab_size": (257, 50257), "model.sequence": (127, 128),
        "model.layers": (3, 8), "mesh.tensor": (1, 2, 3, 4, 5), "mesh.data": (1, 2, 6), "mesh.pipe": (1, 2),
        "batch.global_batch": (16, 30), "batch.micro_batch": (2, 3), "run.steps": (40, 99),
        "optimizer.warmup_steps": (5,),
    }  # fmt: skip
    refused = 0
    for _ in range(300):
        values = {name: draw.choice(some) for name, some in sizes.items()}
        refused += bool(refusal(values))
        steps_to_fit(values, most=5)
    assert refused > 200


@pytest.mark.parametrize("tensor", [5, 25])
def test_the_vocabulary_is_padded_for_tensor(tensor):
    values = {"model.hidden": 1600, "model.heads": 25, "model.vocab_size": 50257, "mesh.tensor": tensor}
    assert refusal(values).endswith(f"; model.vocab_multiple={128 * tensor} would fit")
