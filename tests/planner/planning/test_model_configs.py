"""Real config.json of model_configs.json: what is implemented is planned, and everything else refused by its name.

Each has its source there: a public repository, its commit and the file. `parameters` is the published count, and
`counted` says who counted; one that is not rounded must be met exactly.
"""

import functools
import json
import math
import pathlib
import re

import pytest

from paxtrain.config.load import from_dict
from paxtrain.errors import UserError
from paxtrain.huggingface.described import configuration
from paxtrain.model import parameters
from planner.cluster.cluster import Cluster
from planner.cluster.variants import of_devices
from planner.planning.inputs import search_for
from planner.planning.options import PlanOptions
from planner.search.search import Outcome

MODELS = {row["name"]: row for row in json.loads(pathlib.Path(__file__).with_name("model_configs.json").read_text())}
KNOWN = [name for name, row in MODELS.items() if "parameters" in row]
CLOSE = 0.005  # share by which a rounded count may differ
H100S = Cluster.load("h100_16x8")


@functools.cache
def values(name: str) -> dict:
    return configuration(MODELS[name]["config"], "config.json")


def planned(name: str, devices: int, **narrow: object) -> Outcome:
    """Return the plans for H100s without what the search can do without: compiled memory, thorough placements."""
    options = PlanOptions(oracle="no", **narrow)
    search = search_for(values(name), of_devices(H100S, devices), options)
    search.require_one()
    return search.run(top=1, placed=0)


def check(name: str, devices: int, **narrow: object) -> bool:
    """Plan, or see why it cannot be: what each weight takes is much of the memory, 18 bytes with gradient and state."""
    config = from_dict(values(name))
    size, batch = parameters.published(config.model), config.batch.global_batch * config.model.sequence
    try:
        outcome = planned(name, devices, **narrow)
    except UserError as error:
        assert re.search(r"no configuration fits into 78.1 GB per device: .* GB too much; more ", str(error))
        assert 18 * size / devices > 0.5 * 78.1e9
        return False
    best = outcome.ranked[0]
    least = 6 * size * batch / (devices * 989e12)  # seconds, at an H100's data sheet's rate
    assert 0.5 * least < best.seconds < 50 * least
    assert math.prod(best.candidate.sizes.values()) == devices and best.memory <= 78.1e9
    return True


def test_each_has_its_published_parameters():
    assert len(MODELS) == 60 and len(KNOWN) == 41
    for name in KNOWN:
        row, found = MODELS[name], parameters.published(from_dict(values(name)).model)
        rounded = "rounded" in row["counted"]
        assert abs(found / row["parameters"] - 1) <= CLOSE * rounded, (name, found)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in KNOWN])
def test_what_is_not_implemented_is_refused_by_its_name(name):
    told = MODELS[name]["config"]["model_type"]
    by_field = {
        "Qwen 3 32B in FP8": "is of a quantized model \\(fp8\\); take the one that it was made of",
        "Phi 4 mini (longrope)": "rope_type='longrope' is not implemented for training; .* llama3, yarn would fit",
    }
    words = f"of model_type '{told}', which is not implemented; gemma2, gemma3_text, .* llama, .* smollm3 are"
    with pytest.raises(UserError, match=f"^config.json.*{by_field.get(name, words)}$") as error:
        values(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["Qwen 3 0.6B", "SmolLM 3 3B", "Llama 3.1 405B"])
def test_one_device_is_planned_for_or_told_to_be_too_few(name):
    assert check(name, 1, tensor=(1,)) == (name == "Qwen 3 0.6B")


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_all_are_planned_for_8_64_and_512_devices(name):
    fits = [check(name, devices) for devices in (8, 64, 512)]
    assert fits == sorted(fits) and fits[2]
