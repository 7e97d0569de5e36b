"""The benchmark's main: what it refuses, in one sentence."""

import pytest

from paxtrain.profiling import ledger
from paxtrain.xla import aot
from tests import mains


def unavailable(*args, **kwargs):
    raise aot.Unavailable("compiling for GPUs needs jax's CUDA plugin, which is not installed; install it")


@pytest.mark.parametrize(
    ("module", "given", "complaint"),
    [
        ("paxtrain.profile", "--ledger", "the ledger is read from a program for GPUs: compiling for GPUs needs jax's"),
        (
            "experiments.bench.trainer.__main__",
            "--sections=pases",
            "unknown section 'pases'; known are memory, throughput",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_mistake_is_one_sentence(module, given, complaint, monkeypatch, capsys):
    monkeypatch.setattr(aot, "devices", unavailable)
    assert mains.run(monkeypatch, mains.load(module), given) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and complaint in err
    assert out == ""


def test_part_is_the_first_scope_that_fits():
    assert ledger.part("jit(_step)/while/body/backward/transpose(jvp(layer))/mul") == "layers"
    assert ledger.part("jit(_step)/head/jvp(head_loss)/reduce_max") == "head"
    assert ledger.part("jit(_step)/optimizer/sync/layer") == "optimizer"
    assert ledger.part("jit(_step)/multilayer") == "other"
