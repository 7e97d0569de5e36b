"""Logs of five trainers as rows; their lines are as the trainers print them."""

import json

import pytest

from paxtrain.errors import UserError
from planner import convert
from planner.runs import logs, trials

# As lines in public threads: epfLLM/Megatron-LLM issue 11, huggingface/nanotron issue 390, pytorch/torchtitan pull
# request 1884 (four ranks print each step), AI-Hypercomputer/maxtext pull request 4626.
MEGATRON = "".join(
    f" iteration      {n}/  250000 | consumed samples:       124928 | elapsed time per iteration (ms): {ms} | learning "
    "rate: 9.150E-06 | global batch size:  1024 | lm loss: 2.504220E+00 | number of nan iterations:   0 |\n"
    for n, ms in ((122, 186545.2), (123, 87871.6), (124, 89474.8), (125, 89075.2), (126, 89692.9))
)
NANOTRON = "".join(
    f"10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: {n} / 378950 | consumed_tokens: 85.8G | "
    f"elapsed_time_per_iteration_ms: {ms} | tokens_per_sec: 22.8K | tokens_per_sec_per_gpu: 11.4K | "
    "global_batch_size: 64 | lm_loss: 2.38\n"
    for n, ms in ((1, "60K"), (2, "30K"), (3, "12K"), (4, "11.5K"), (5, "11.7K"), (6, "950"))
)
TITAN = "".join(
    f"[rank{rank}]:[titan] 2025-10-15 10:37:01,390 - root - INFO - step: {n:2}  loss: 12.2465  grad_norm:  4.5253  "
    f"memory: {gib}GiB(34.95%)  tps: {tps}  tflops: 4.98  mfu: 0.50%\n"
    for n, gib, tps in ((1, "33.21", "86"), (10, "44.84", "5,615"), (20, "44.84", "5,600"), (30, "44.84", "5,650"))
    for rank in range(4)
)
MAXTEXT = "".join(
    f"I0729 19:52:57.134704 140516855904064 metric_logger.py:226] completed step: {n}, seconds: {s}, TFLOP/s/device: "
    "134.924, Tokens/s/device: 8672.758, total_weights: 196608, loss: 10.374\n"
    for n, s in ((0, 30.1), (1, 9.0), (2, 6.0), (3, 5.667), (4, 5.7), (5, 5.6))
)
OWN = "".join(
    json.dumps({"step": n, "loss": 1.0, "step_seconds": s}) + "\n" for n, s in enumerate((9.0, 1.0, 1.0, 0.5, 0.7))
)
GIVEN = {
    **{"cluster": "mine", "devices": "64", "devices_per_host": "8", "device_kinds": "H100", "hidden": "4096"},
    **{"heads": "32", "layers": "32", "seq": "4096", "vocab": "32000", "global_batch": "256", "micro_batch": "1"},
    **{"tp": "8", "dp": "8", "pp": "1", "recompute": "none", "dtype": "bf16"},
}


@pytest.mark.parametrize(
    ("text", "trainer", "seconds", "cells"),
    [
        (MEGATRON, "megatron-lm", (89.0752 + 89.6929) / 2, {"global_batch": "1024"}),
        (NANOTRON, "nanotron", 11.5, {"global_batch": "64"}),
        (MAXTEXT, "maxtext", 5.667, {}),
        (OWN, "", 0.6, {}),
    ],
)
def test_seconds_are_the_median_of_the_steps_after_the_first_ones(text, trainer, seconds, cells):
    found = logs.read(text)
    assert (found.trainer, found.cells) == (trainer, cells)
    row = logs.row(found, GIVEN)
    assert float(row["seconds"]) == pytest.approx(seconds, rel=1e-5) and row["global_batch"] == "256"


def test_tokens_per_second_of_a_device_become_seconds():
    found = logs.read(TITAN)
    assert len(found.steps) == 4 and float(found.cells["memory_gb"]) == pytest.approx(44.84 * 1.073741824, rel=1e-4)
    assert float(logs.row(found, GIVEN)["seconds"]) == pytest.approx(256 * 4096 / 64 / 5650, rel=1e-5)
    with pytest.raises(UserError, match="need seq, devices and global_batch"):
        logs.row(found, {"seq": "4096"})


def test_runs_are_added_to_a_table(tmp_path):
    out, cells = tmp_path / "trials.csv", [f"{name}={value}" for name, value in GIVEN.items()]
    for text in (MEGATRON, TITAN):
        (tmp_path / "run.log").write_text(text)
        convert.main(["convert", str(tmp_path / "run.log"), str(out), *cells])
    first, second = trials.read(out)
    assert (first.trainer, second.trainer) == ("megatron-lm", "torchtitan") and second.memory == pytest.approx(48.15e9)


@pytest.mark.parametrize(
    ("text", "cells", "message"),
    [
        ("step 1 took long\n", [], "no log that logs.py does"),
        ("", [], "no log that logs.py does"),
        (MEGATRON, ["colour=red"], "colour is no column of the table of runs"),
        (MEGATRON, ["red"], "must be written column=value, got 'red'"),
        (MEGATRON, [], "cluster must have a name"),
        ("\x00\xff{" * 9, [], "no log that logs.py does"),
    ],
)
def test_bad_logs_and_cells(tmp_path, text, cells, message):
    (tmp_path / "run.log").write_text(text)
    with pytest.raises(UserError, match=message):
        convert.main(["convert", str(tmp_path / "run.log"), str(tmp_path / "trials.csv"), *cells])
    assert not (tmp_path / "trials.csv").exists()
