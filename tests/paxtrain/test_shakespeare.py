"""Real text, real training: minutes, so only in the slow tests."""

import pathlib
import subprocess
import sys
import time

import pytest

from paxtrain.config import from_dict
from paxtrain.model import parameters
from paxtrain.run import metrics

ROOT = pathlib.Path(__file__).parents[2]
TEXT = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"


@pytest.mark.slow
@pytest.mark.skipif(not TEXT.exists(), reason=f"needs {TEXT.name} in ../shared/data/text, beside the repository")
def test_below_two_nats_per_byte_within_five_minutes(tmp_path):
    from configs import shakespeare

    config = from_dict(shakespeare.get_config())
    assert parameters.published(config.model) <= 3e6
    python, prepared, out = [sys.executable, "-m"], tmp_path / "data", tmp_path / "run"
    began = time.monotonic()
    subprocess.run([*python, "paxtrain.prepare", f"--input={TEXT}", f"--out={prepared}"], cwd=ROOT, check=True)
    subprocess.run(
        [
            *python,
            "paxtrain.train",
            "--config=configs/shakespeare.py",
            f"--config.run.out={out}",
            f"--config.data.train={prepared}/train",
            f"--config.data.validation={prepared}/validation",
        ],
        cwd=ROOT,
        check=True,
        timeout=600,
    )
    losses = [r["validation_loss"] for r in metrics.read(out / metrics.FILE) if "validation_loss" in r]
    print(f"validation losses {losses} in {time.monotonic() - began:.0f} s")
    assert losses[0] > 5.5
    assert losses[-1] < 2.0
