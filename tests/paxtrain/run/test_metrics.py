"""Metrics on disk and on the terminal, FLOPs by hand, and a figure of the recorded metrics."""

import io
import json
import pathlib
import struct
import time

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread
from tensorboardX.proto.event_pb2 import Event

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError
from paxtrain.model.parameters import flops_per_token
from paxtrain.profiling import canvas
from paxtrain.run import metrics, plots
from paxtrain.run.metrics import Metrics, ProgressLine


def write(out, steps, resumed=None, value=0.0):
    with Metrics(out, primary=True, resumed=resumed) as writer:
        for step in steps:
            writer.write(step, {"loss": value + step})
    return metrics.read(out / metrics.FILE)


def board_scalars(out):
    """Return (step, value) of every TensorBoard scalar, from the records: length, checksum, event, checksum."""
    scalars = []
    for path in (out / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            scalars += [(event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return scalars


def test_one_line_per_step_and_the_same_for_tensorboard(tmp_path):
    assert write(tmp_path, [1, 2]) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    assert sorted(board_scalars(tmp_path)) == [(1, 1.0), (2, 2.0)]


def test_without_loggers_there_is_one_file(tmp_path):
    with Metrics(tmp_path, primary=True, loggers=()) as writer:
        writer.write(1, {"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == [metrics.FILE]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb_has_one_run_of_all_starts(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed, which this compares with")
    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics.check_loggers(["wandb"])
    for resumed, loss in ((None, 1.25), (1, 2.375), (None, 3.75)):
        with Metrics(tmp_path, True, resumed, loggers=("wandb", "tensorboard"), config={"seed": 77321}) as writer:
            writer.write(1 + (resumed or 0), {"loss": loss, "validation_loss/web": float("nan")})
        time.sleep(1.1)  # wandb's folders have the second in their names
    folders = sorted(path for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run"))
    first, second, anew = (folder.name.rpartition("-")[2] for folder in folders)
    assert first == second != anew == (tmp_path / metrics.WANDB_ID).read_text()
    for folder, loss in zip(folders, (b"1.25", b"2.375", b"3.75")):
        [raw] = [path.read_bytes() for path in folder.glob("*.wandb")]
        assert all(part in raw for part in (b"loss", loss, b"77321")) and b"validation_loss" not in raw
    assert [value for _, value in sorted(board_scalars(tmp_path))][-1] == 2.375


def test_scalars_of_every_kind_become_valid_json(tmp_path):
    with Metrics(tmp_path, primary=True) as writer:
        writer.write(1, {"a": jnp.float32(0.5), "b": np.int64(3), "c": float("nan"), "d": jnp.inf, "skipped": np.True_})
    (line,) = (tmp_path / metrics.FILE).read_text().splitlines()
    expected = {"step": 1, "a": 0.5, "b": 3, "c": None, "d": None, "skipped": True}
    assert json.loads(line, parse_constant=pytest.fail) == expected


def test_a_resumed_run_drops_the_lines_that_it_repeats(tmp_path):
    write(tmp_path, range(1, 8))
    records = write(tmp_path, range(5, 10), resumed=4, value=100.0)
    assert [(r["step"], r["loss"]) for r in records] == [(s, s + 100.0 * (s > 4)) for s in range(1, 10)]
    assert [path.name for path in tmp_path.glob("metrics*")] == [metrics.FILE]


def test_a_run_that_goes_back_sets_later_lines_aside(tmp_path):
    write(tmp_path, range(4))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for _ in range(2):  # the second time there is nothing to set aside
        metrics.Metrics(tmp_path, True, resumed=1, set_aside=True).close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:2]
    assert (tmp_path / "metrics_set_aside.jsonl").read_text().splitlines() == lines[2:]


def test_a_run_that_starts_afresh_keeps_no_line(tmp_path):
    write(tmp_path, range(8))
    assert write(tmp_path, [0]) == [{"step": 0, "loss": 0.0}]


def test_a_line_cut_short_by_a_crash_is_no_line(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / metrics.FILE
    path.write_text(path.read_text() + '{"step": 3, "lo')
    assert [record["step"] for record in metrics.read(path)] == [1, 2]
    assert [record["step"] for record in write(tmp_path, [3], resumed=2)] == [1, 2, 3]


def test_only_the_primary_process_writes(tmp_path):
    with Metrics(tmp_path, primary=False) as writer:
        writer.write(1, {"loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_unreadable_metrics(tmp_path):
    with pytest.raises(UserError, match=r"cannot read metrics from .*absent"):
        metrics.read(tmp_path / "absent")


def test_a_number_that_is_too_large_for_a_float_is_no_record(tmp_path):
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in ((1, 5.0), (2, 10**400), (3, 4.0), (4, 3.5))]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / metrics.FILE).write_text("".join(lines))
    assert [record["step"] for record in metrics.read(tmp_path / "one" / metrics.FILE)] == [1, 3, 4]
    plots.plot_runs([tmp_path / "one", tmp_path / "two"], tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(file, steps, **arguments):
    with ProgressLine(total=100, file=file, **arguments) as progress:
        for step in steps:
            progress.update(step, {"loss": 2.5, "balance": 4.0}, tokens_per_second=12_300.0, step_seconds=0.25)
    return file.getvalue()


def test_progress_in_a_log_file_is_a_few_whole_lines():
    text = show(io.StringIO(), range(1, 101), seconds_between_lines=60.0)
    first, last = text.splitlines()
    assert first.startswith("step 1/100: loss 2.5000, balance 4.0000, 12.3k tokens/s, 250 ms/step")
    assert last.startswith("step 100/100: ") and last.endswith("00:00 left")
    assert "\r" not in text


def test_progress_on_a_terminal_is_a_bar_that_starts_at_the_resumed_step():
    text = show(Terminal(), [41, 42, 100], initial=40)
    assert "\r" in text and "40/100" in text and "100/100" in text and "loss 2.5000" in text


def test_progress_of_other_processes_is_silent():
    assert show(io.StringIO(), [1, 100], primary=False) == ""


def test_flops_per_token_by_hand():
    """A matrix product has 2 forward and 4 backward FLOPs for each weight; biases and norms add a little."""
    model = ModelConfig(vocab_size=50257, layers=12, hidden=768, heads=12, sequence=1024)
    h, s = 768, 1024
    products = 12 * (3 * h * h + h * h + 2 * 4 * h * h) + 50257 * h
    attention = 12 * (2 * h * s)  # scores and weighted sum, a multiplication and an addition each
    assert flops_per_token(model) == pytest.approx(6 * products + 3 * 2 * attention, rel=2e-3)
    assert flops_per_token(model) > 6 * products + 3 * 2 * attention


def test_mfu_of_a_mesh():
    model = ModelConfig()
    peak = 1e12
    full = 8 * peak / flops_per_token(model)
    assert metrics.mfu(full / 4, model, devices=8, peak=peak) == pytest.approx(0.25)


def test_smoothing_keeps_a_line_and_calms_noise():
    assert plots.smooth(np.arange(20.0), 5)[:-2] == pytest.approx(np.arange(18.0))
    assert plots.smooth(np.append(np.zeros(30), 1.0), 5)[-1] == pytest.approx(1 / 3)  # not the last value alone
    noise = np.random.default_rng(0).normal(size=400)
    assert plots.smooth(noise, 25)[20:-20].std() < 0.3 * noise.std()


def test_figure_shows_losses_and_skipped_steps(tmp_path):
    """The figure has the colour of each series, but that of skipped steps only if the run skipped some."""

    def coloured(skipped: bool):
        with Metrics(tmp_path, primary=True) as writer:
            writer.write(0, {"validation_loss": 5.5})
            for step in range(1, 121):
                bad = skipped and step == 60
                loss = float("nan") if bad else 1 + 4 * 0.97**step
                writer.write(step, {"loss": loss, "learning_rate": 1e-3 * step / 120, "skipped": bad})
            writer.write(120, {"validation_loss": 1.2})
        plots.plot_losses(tmp_path / metrics.FILE, tmp_path / "loss.png")
        pixels = imread(tmp_path / "loss.png")[..., :3]
        colours = ("#2f6f9f", "#d9622b", "#5c6670", "#b3261e")
        rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours])
        return [int((np.abs(pixels - c).max(-1) < 0.01).sum()) for c in rgb]

    with_skip, without = coloured(True), coloured(False)
    assert all(count > 50 for count in with_skip)
    assert all(count > 50 for count in without[:3]) and without[3] == 0


def test_a_figure_that_is_cut_off_leaves_the_old_one(tmp_path, monkeypatch):
    with Metrics(tmp_path, primary=True) as writer:
        writer.write(1, {"loss": 3.0})
    png = tmp_path / "loss.png"
    plots.plot_losses(tmp_path / metrics.FILE, png)
    good = png.read_bytes()

    def cut_off(_, path, **options):
        pathlib.Path(path).write_bytes(good[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(canvas.Figure, "savefig", cut_off)
    with pytest.raises(KeyboardInterrupt):
        plots.plot_losses(tmp_path / metrics.FILE, png)
    assert png.read_bytes() == good and not list(tmp_path.glob(".loss.png*"))


@pytest.mark.parametrize(
    "values", [{"loss": 3.0}, {"validation_loss": 5.5}, {"loss": 900.0}, {"validation_loss/web": 5.5}]
)
def test_figure_of_a_single_point(tmp_path, values):
    with Metrics(tmp_path, primary=True) as writer:
        writer.write(1, values)
    plots.plot_losses(tmp_path / metrics.FILE, tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").shape[:2] == (840, 1350)


def test_figure_of_several_validation_sets(tmp_path):
    """Each validation set has a different colour."""
    with Metrics(tmp_path, primary=True) as writer:
        for step, web, code in ((0, 5.5, 5.4), (60, 3.0, 2.0), (120, 2.5, 1.2)):
            writer.write(step, {"validation_loss/web": web, "validation_loss/code": code})
    records = metrics.read(tmp_path / metrics.FILE)
    assert metrics.validation_losses(records, 60) == {"validation_loss/web": 3.0, "validation_loss/code": 2.0}
    plots.plot_losses(tmp_path / metrics.FILE, tmp_path / "loss.png")
    pixels = imread(tmp_path / "loss.png")[..., :3]
    for colour in ("#d9622b", "#4f8a3c"):
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(-1) < 0.01).sum() > 50


def test_figure_without_losses(tmp_path):
    with Metrics(tmp_path, primary=True) as writer:
        writer.write(1, {"loss": float("nan")})
    with pytest.raises(UserError, match="has no loss yet"):
        plots.plot_losses(tmp_path / metrics.FILE, tmp_path / "loss.png")


def test_figure_of_several_runs(tmp_path, monkeypatch):
    runs = [tmp_path / "one", tmp_path / "two"]
    for run, rate in zip(runs, (0.5, 0.9)):
        with Metrics(run, primary=True) as writer:
            for step in range(1, 41):
                writer.write(step, {"loss": 1 + rate**step})
            writer.write(40, {"validation_loss": 1.25})
    drawn = []
    monkeypatch.setattr(canvas, "style", drawn.append)
    plots.plot_runs(runs, tmp_path / "losses.png")
    assert imread(tmp_path / "losses.png").shape[:2] == (750, 1350)
    [axes] = drawn
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "one (validation 1.250)",
        "two (validation 1.250)",
    ]
    curves = {line.get_label(): line.get_ydata() for line in axes.lines if not line.get_label().startswith("_")}
    assert [curve[0] for curve in curves.values()] == [1.5, 1.9]
    write(tmp_path / "short", [1])
    with pytest.raises(UserError, match=r"short/metrics.jsonl has fewer than two steps' losses"):
        plots.plot_runs([tmp_path / "short"], tmp_path / "losses.png")
