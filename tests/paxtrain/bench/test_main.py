"""The benchmark's main: what it refuses, in one sentence."""

import pytest

from paxtrain.bench import ledger
from paxtrain.xla import aot
from tests import mains


def unavailable(*args, **kwargs):
    raise aot.Unavailable("compiling for GPUs needs jax's CUDA plugin, which is not installed; install it")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("--sections=ledger", "the ledger is read from a program for GPUs: compiling for GPUs needs jax's CUDA plugin"),
        ("--sections=leger", "unknown section 'leger'; known are memory, throughput, bubble, ledger"),
    ],
)
def test_a_mistake_is_one_sentence(given, complaint, monkeypatch, capsys):
    monkeypatch.setattr(aot, "devices", unavailable)
    assert mains.run(monkeypatch, mains.load("paxtrain.bench.__main__"), given) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and complaint in err
    assert out == ""


def test_part_is_the_first_scope_that_fits():
    assert ledger.part("jit(_step)/while/body/backward/transpose(jvp(layer))/mul") == "layers"
    assert ledger.part("jit(_step)/head/jvp(head_loss)/reduce_max") == "head"
    assert ledger.part("jit(_step)/optimizer/sync/layer") == "optimizer"
    assert ledger.part("jit(_step)/multilayer") == "other"
