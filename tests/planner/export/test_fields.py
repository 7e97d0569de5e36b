"""Fields of the model in exports: the table in docs/export.md says of each what becomes of it in which trainer."""

import dataclasses
import pathlib
import re

import pytest

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, ModelConfig, PipelineConfig
from paxtrain.config.options import OptionValues
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from planner.export import maxtext, megatron, torchtitan
from planner.export.exported import USUAL_LLAMA3

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "export.md"
TRAINERS = {"Megatron-LM": megatron, "torchtitan": torchtitan, "MaxText": maxtext}
GPT2 = ModelConfig(vocab_size=256, layers=4)
LLAMA = dataclasses.replace(GPT2, family="llama", tied_head=False, kv_heads=2, intermediate=256, separator=0)
MISTRAL, QWEN3 = (dataclasses.replace(LLAMA, family=family) for family in ("mistral", "qwen3"))
TIED = (dataclasses.replace(model, dtype="float32", tied_head=True) for model in (GPT2, LLAMA))
GEMMA = dataclasses.replace(LLAMA, family="gemma2", layers=8, tied_head=True, head_size=256, norm_epsilon=1e-6)
BASES = [GPT2, LLAMA, MISTRAL, QWEN3, GEMMA, *TIED]
# Other values than those of the bases.
VALUES = {
    "module": ("tests.paxtrain.model.parallel_block:ParallelBlock",),
    "family": ("gpt2", "llama", "qwen2", "gemma2"),
    "vocab_size": (384, 500),
    "vocab_multiple": (512,),
    "layers": (8, 16),
    "hidden": (256,),
    "heads": (8,),
    "kv_heads": (1,),
    "head_size": (64,),
    "rope_scaling": (
        OptionValues({"rope_type": "linear", "factor": 2.0}),
        OptionValues({"rope_type": "llama3", "factor": 8.0, **USUAL_LLAMA3}),
        OptionValues({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}),
    ),
    "options": (OptionValues({"sliding_window": 8}),),
    "intermediate": (512,),
    "sequence": (256,),
    "tied_head": (False, True),
    "rope_theta": (500_000.0, 10_000.5),
    "norm_epsilon": (1e-6, 1e-4),
    "embedding_dropout": (0.1,),
    "residual_dropout": (0.1,),
    "dtype": ("float32", "bfloat16"),
    "attention": ("xla",),
    "separator": (-1, 7),
}


def rows() -> dict[str, dict[str, str]]:
    """Return what the page says of each field, by trainer."""
    table = PAGE.read_text().split("## Fields of the model")[1].split("##")[0]
    names, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    return {field: dict(zip(names[1:], cells[1:])) for cells in lines for field in re.findall(r"`(\w+)`", cells[0])}


def plan(pipe: int) -> Plan:
    """Return a plan for four devices of one host."""
    mesh = MeshConfig(data=4 // pipe, pipe=pipe)
    return Plan(mesh, PipelineConfig("1f1b", save="residuals"), BatchConfig(16, 1), CompressConfig(), ("a",), 4)


def told(trainer, model: ModelConfig, pipe: int) -> tuple[object, object]:
    """Return the files of an export and what it says that the trainer cannot do."""
    try:
        made = trainer.export(plan(pipe), model, (model.layers // pipe,) * pipe)
    except UserError as error:
        return None, str(error)
    return made.files, made.inexpressible


def test_the_page_has_each_field_once():
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    table = PAGE.read_text().split("## Fields of the model")[1].split("##")[0]
    named = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if line else "")]
    assert sorted(named) == sorted(fields) == sorted(VALUES)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("field", VALUES)
def test_what_the_page_says_of_a_field_becomes_of_it(field, name):
    """Files change with what is set, and what is said with what cannot be; the rest changes neither."""
    written = said = False
    for model in BASES:
        for value in VALUES[field]:
            if field == "kv_heads" and model.family == "gpt2":
                continue
            other = dataclasses.replace(model, **{field: value} | ({"kv_heads": 0} if value == "gpt2" else {}))
            for pipe in (1, 4):
                (files, cannot), (other_files, other_cannot) = (told(TRAINERS[name], m, pipe) for m in (model, other))
                written |= None not in (files, other_files) and files != other_files
                said |= cannot != other_cannot
    cell = rows()[field][name]
    assert (written, said) == (cell.startswith("set"), "cannot" in cell), cell
    assert cell.startswith(("set", "cannot", "not applicable"))
