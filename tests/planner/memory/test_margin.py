"""The compiler's labels, and the safety margin of the closed form that they give."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from experiments.memory import labels as maker
from paxtrain.config import ModelConfig
from planner.memory import compiled, margin
from tests.sources import ROOT

LLAMA = ModelConfig(family="llama")


@pytest.fixture(scope="module")
def labels() -> list[maker.LabelRow]:
    return maker.read(maker.FILES["gpt2"])


def row(config, total: float, name: str = "label") -> maker.LabelRow:
    return maker.LabelRow(name, config, compiled.OracleMemory(1, int(total) - 1, int(total), 1.0, "made up"))


def test_the_shipped_labels_are_small_and_few_and_the_held_out_ones_two_to_eight_times_as_large(labels):
    sizes = {name: [maker.parameters(r.config) for r in labels if r.set == name] for name in ("label", "held out")}
    assert 40 <= len(sizes["label"]) <= 100
    assert len(sizes["held out"]) >= 10
    ratios = np.array(sizes["held out"]) / max(sizes["label"])
    assert ratios.min() >= 2
    assert ratios.max() <= 8.5
    assert all(r.memory.source.startswith("XLA for NVIDIA H100") for r in labels)


def logs(labels, name):
    """Return log(compiler / closed form) of the labels of a set."""
    some = [r for r in labels if r.set == name]
    closed = [maker.bytes_of(r.config) for r in some]
    return np.log([r.memory.total for r in some]) - np.log(closed)


def test_the_margin_is_the_most_that_the_compiler_exceeded_the_closed_form_by(labels):
    found = logs(labels, "label")
    assert len(found) == margin.MARGINS["gpt2"].labels
    assert pytest.approx(found.max(), abs=1e-4) == margin.MARGINS["gpt2"].log
    words = margin.origin(ModelConfig())
    assert f"{math.expm1(found.max()):.0%}" in words and str(len(found)) in words


@pytest.mark.parametrize(("name", "margins"), [("label", margin.MARGINS), ("without a pipeline", margin.ALONE)])
def test_llamas_have_margins_of_their_own(name, margins):
    labels = maker.read(maker.FILES["llama"])
    found = logs(labels, name)
    assert len(found) == margins["llama"].labels
    assert pytest.approx(found.max(), abs=1e-4) == margins["llama"].log
    assert f"{math.expm1(found.max()):.0%}" in margin.origin(LLAMA)
    assert {r.config.mesh.pipe == 1 for r in labels if r.set == name} == {name != "label"}
    assert all(r.config.model.family == "llama" for r in labels)


def test_the_margin_holds_for_programs_that_it_was_not_measured_on(labels):
    found = logs(labels, "held out")
    assert (found <= margin.MARGINS["gpt2"].log).all() and np.abs(np.expm1(-found)).mean() <= 0.12
    assert (found > 0).any()  # without the margin some would not fit


def test_the_margin_depends_on_the_family_and_on_whether_there_is_a_pipeline():
    several, alone = (margins["llama"].log for margins in (margin.MARGINS, margin.ALONE))
    np.testing.assert_array_equal(margin.margin(LLAMA, np.array([1, 2, 8])), [alone, several, several])
    np.testing.assert_array_equal(margin.margin(ModelConfig(), np.array([1, 2])), [margin.MARGINS["gpt2"].log] * 2)
    # An architecture of one's own, of which nothing was compiled, has the largest of all.
    own = ModelConfig(module="some.package:Class")
    np.testing.assert_array_equal(margin.margin(own, np.array([1, 2])), [alone, margin.MARGINS["gpt2"].log])
    assert margin.origin(own).endswith("; none of them of some.package:Class")


def test_a_memory_estimate_of_a_known_layer_imports_no_jax(tmp_path):
    """The first one of a model reads its layer's program, by jax; the cache has it from then on."""
    code = (
        "import sys; from planner.memory import closed_form, margin; from paxtrain.config import Config;"
        "total = closed_form.analytic(closed_form.of(Config())).total;"
        "print(total * margin.margin(Config().model, 1), 'jax' in sys.modules)"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE
        ).stdout.split()
        for _ in range(2)
    )
    assert (first[1], second) == (b"True", [first[0], b"False"])


def test_the_table_has_a_line_for_each_set(labels):
    lines = maker.report(labels).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["label", "held out"]
    assert f"| {margin.MARGINS['gpt2'].labels} |" in lines[2]


@pytest.mark.parametrize("family", sorted(maker.FILES))
def test_labels_survive_the_file(tmp_path, family):
    rows = [row(config, 1000 + i, name) for i, (name, config) in enumerate(maker.DESIGNS[family]())]
    maker.write(rows, tmp_path / "labels.csv")
    assert maker.read(tmp_path / "labels.csv") == rows


def test_a_plan_is_told_its_own_margin():
    alone, several = margin.origin(LLAMA, 1), margin.origin(LLAMA, 4)
    assert f"{math.expm1(margin.ALONE['llama'].log):.0%}" in alone and alone.endswith(" 8 programs without a pipeline")
    assert f"{math.expm1(margin.MARGINS['llama'].log):.0%}" in several and several.endswith("programs with a pipeline")
    assert alone not in margin.origin(LLAMA) and margin.origin(ModelConfig(), 1) == margin.origin(ModelConfig())
