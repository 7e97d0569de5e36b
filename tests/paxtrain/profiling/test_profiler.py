"""A profiled window of a training run: its traces, its breakdown, and no trace of it when it is off."""

import contextlib
import gzip
import json
import time

import jax
import matplotlib.colors
import numpy as np
import pytest
from jax.profiler import ProfileData
from matplotlib.image import imread

from paxtrain.config import MeshConfig, from_dict, to_dict
from paxtrain.data import token_files
from paxtrain.errors import UserError
from paxtrain.parallel.mesh import make_mesh
from paxtrain.profiling import timeline
from paxtrain.profiling.breakdown import PARTS, Traced
from paxtrain.profiling.profiler import GROUPS, PICTURE, TABLE, TIMELINE, Profiler
from paxtrain.profiling.timeline import COLORS, joined, shares, typical
from paxtrain.profiling.trace import Part, Span
from paxtrain.run import metrics
from paxtrain.run.run import Run
from tests import small

STEPS, PROFILED, PAUSE = 6, (3, 4, 5), 0.5


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiling")
    with token_files.TokenWriter(path / "tokens", 64) as writer:
        writer.extend(np.random.default_rng(0).integers(0, 64, 4000).tolist())
        writer.end_document()
    return path


def config(home, out, profile="", mesh=(2, 2, 2), **run):
    data = str(home / "tokens")
    return small.config(
        mesh,
        (16, 4),
        model={"layers": 2, "vocab_size": 64},
        pipeline={"schedule": "1f1b"},
        compress={"backward_messages": "all", "backward_rank": 2}
        | {"data_stages": "all", "data_rank": 2, "data_rank_min": 2, "data_start": 0.0},
        optimizer={"warmup_steps": 0},
        data={"train": data, "validation": data},
        run={"steps": STEPS, "out": str(out), "eval_every": 4, "eval_batches": 1, "sample_tokens": 0} | run,
        profile=profile,
    )


class Slow(Run):
    """Run that gets its batches late while it is profiled."""

    def batches(self, name, start_sample=0, part=""):
        for number, batch in enumerate(super().batches(name, start_sample, part), 1):
            if name == "train" and number in PROFILED:
                time.sleep(PAUSE)
            yield batch


def started(config, run=Run):
    return run(config, small.mesh_of(config))


@pytest.fixture(scope="module")
def profiled(home):
    """Return the folder of a run whose steps 3 to 5, with a validation between them, are profiled."""
    out = home / "run"
    started(config(home, out, "3:6"), Slow).train()
    return out


def records(out, name):
    return {r["step"]: r[name] for r in metrics.read(out / metrics.FILE) if name in r}


@pytest.mark.once
def test_the_breakdown_adds_up_to_the_time_that_the_steps_took(profiled):
    [total], step = records(profiled, "profile_step").values(), records(profiled, "step_seconds")
    parts = {name: records(profiled, f"profile_{name}") for name in GROUPS}
    assert {tuple(found) for found in parts.values()} == {(PROFILED[-1],)}
    seconds = {name: found[PROFILED[-1]] for name, found in parts.items()}
    assert sum(seconds.values()) == pytest.approx(total)
    assert total == pytest.approx(np.mean([step[n] for n in PROFILED]), rel=0.03, abs=0.01)
    assert PAUSE / 2 < seconds["input"] < total
    assert all(0 < value < total / 2 for name, value in seconds.items() if name != "input")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # about how jaxlib makes the type of stats
def test_the_trace_holds_the_steps_and_the_scopes(profiled):
    [path] = (profiled / "profile/steps_3_to_5").rglob("*.xplane.pb")
    written = path.read_bytes()
    scopes = (
        "rows_0_to_",
        "forward/chunk_0",
        "backward/chunk_0",
        "head",
        "embedding",
        "compression/encode",
        "compression/decode",
        "send_forward",
        "send_backward",
        "tensor",
        "gather_weights",
        "reduce_gradients",
        "optimizer",
        "sync",
    )
    assert [scope for scope in scopes if f"/{scope}".encode() not in written] == []
    events = [
        event for plane in ProfileData.from_file(str(path)).planes for line in plane.lines for event in line.events
    ]
    assert [dict(e.stats)["step_num"] for e in events if e.name == "train"] == list(PROFILED)


def test_the_timeline_has_a_process_for_each_device_and_a_track_for_each_part(profiled):
    with gzip.open(profiled / "profile/steps_3_to_5" / TIMELINE) as file:
        events = json.load(file)["traceEvents"]
    said = {event["name"]: {} for event in events if event["ph"] == "M"}
    for event in events:
        if event["ph"] == "M":
            said[event["name"]][event["pid"], event.get("tid")] = next(iter(event["args"].values()))
    devices = [said["process_name"][number, None] for number in range(8)]
    assert devices[:2] == ["stage 0, data 0, tensor 0 (device 0)", "stage 0, data 0, tensor 1 (device 1)"]
    assert [name.split(",")[0] for name in devices] == ["stage 0"] * 4 + ["stage 1"] * 4
    assert {PARTS[track] for _, track in said["thread_name"]} == set(PARTS) - {"idle"}
    drawn = [event for event in events if event["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in drawn} == set(said["thread_name"])
    assert min(e["ts"] for e in drawn) >= 0 and all(e["dur"] > 0 for e in drawn)
    inputs = [e for e in drawn if e["name"] == "input" and e["pid"] == 0]
    assert len(inputs) == len(PROFILED) and min(e["dur"] for e in inputs) > PAUSE * 1e6


def test_joined_times_overlap_no_more():
    spans = [Span(*times, Part("work", False)) for times in ((5, 6), (0, 2), (1, 3), (3, 4), (1.5, 2.5))]
    assert list(joined(spans)) == [(0, 4), (5, 6)]
    assert list(joined([])) == []


def test_the_legend_of_the_picture_names_every_color_inside_the_figure():
    spans = [Span(0.1 * i, 0.1 * (i + 1), Part(part, link)) for i, part in enumerate(COLORS) for link in (False, True)]
    device = jax.devices()[0]
    traced = Traced((device,), [(0.0, 2.0)], [spans])
    figure = timeline.draw(traced, make_mesh(MeshConfig(), devices=[device]))
    figure.draw_without_rendering()
    [legend] = figure.legends
    drawn = {matplotlib.colors.to_hex(patch.get_facecolor()) for patch in legend.get_patches()}
    assert drawn == set(COLORS.values()) and len(legend.get_patches()) == len(drawn)
    assert {"tensor", "sync", "forward"} <= {text.get_text() for text in legend.get_texts()}
    box, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 <= whole.y1


def test_table_and_picture(profiled):
    table = (profiled / "profile/steps_3_to_5" / TABLE).read_text()
    assert "input" in table and "stage 1" in table and "100.0%" in table
    pixels = imread(profiled / "profile/steps_3_to_5" / PICTURE)[..., :3]
    for name in ("forward", "backward", "pipeline", "input"):
        color = [int(COLORS[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels - color).max(-1) < 0.01).sum() > 50, name


@pytest.mark.slow
def test_a_run_that_goes_on_is_profiled_later_but_not_before(home, profiled, monkeypatch, caplog):
    """The run trains as one without a profile does, which starts no profiler."""
    with pytest.raises(
        UserError, match=r"profile=2:4 begins with step 2, but the run goes on after step 6; name later"
    ):
        started(config(home, profiled, "2:4", steps=8)).train()
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: pytest.fail("it is traced"))
    started(config(home, profiled, "3:6", steps=7)).train()  # as after an interruption: that has been done
    cut = home / "cut" / "profile" / "steps_2_to_3"
    cut.mkdir(parents=True)  # as of a run that was ended while it traced
    with caplog.at_level("WARNING", logger="absl"):
        assert Profiler(config(home, home / "cut", "2:4", steps=8), None, 3).last == 0
    assert "the profile of steps 2:4 was cut short" in caplog.text
    plain = home / "plain"
    started(config(home, plain)).train()
    started(config(home, plain, steps=7)).train()
    assert records(plain, "loss") == records(profiled, "loss")
    assert not any(name.startswith("profile") for r in metrics.read(plain / metrics.FILE) for name in r)
    assert not (plain / "profile").exists()


def test_off_there_is_nothing_around_a_step(home, tmp_path):
    settings = config(home, tmp_path, mesh=(1, 2, 1))
    with Profiler(settings, small.mesh_of(settings), 0) as profiler:
        for number in range(STEPS + 1):
            profiler.resume(number)
            assert isinstance(profiler.reading(), contextlib.nullcontext)
            assert isinstance(profiler.step(number), contextlib.nullcontext)
            assert not profiler.turns(number) and profiler.last == 0
            profiler.pause(None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compress", [{"start": 0.5}, {"start": 0.0, "adapt_every": 3}])
def test_a_window_is_of_one_program(home, tmp_path, compress):
    """Ranks over data change after step 3, because compression starts or they adapt, but a trace needs one program."""
    values = to_dict(config(home, tmp_path / "run", "3:5"))
    values["compress"]["data"] |= compress
    with pytest.raises(UserError, match="profile=3:5 spans step 4, at which gradients over data may"):
        started(from_dict(values)).train()


def test_a_window_that_is_cut_short_leaves_its_trace_and_no_profiler_running(home, tmp_path):
    settings = config(home, tmp_path, "1:3", mesh=(1, 2, 1))
    mesh = small.mesh_of(settings)
    with pytest.raises(RuntimeError, match="out of luck"), Profiler(settings, mesh, 0) as profiler:
        profiler.resume(0)
        raise RuntimeError("out of luck")
    assert list((tmp_path / "profile/steps_1_to_2").rglob("*.xplane.pb"))
    with jax.profiler.trace(tmp_path / "another"):
        pass
    assert Profiler(settings, mesh, 1).last == 0


def test_shares_of_a_step_are_those_of_a_fine_grid():
    draw = np.random.default_rng(0)
    times = np.sort(draw.integers(0, 1000, (40, 2)), axis=1)
    spans = [Span(float(a), float(b), Part("forward", False)) for a, b in times]
    busy = np.zeros(1000, bool)
    for a, b in times:
        busy[a:b] = True
    np.testing.assert_allclose(shares(spans, np.linspace(0, 1000, 26)), busy.reshape(25, 40).mean(axis=1))
    assert typical([(0.0, 5.0), (5.0, 6.0), (6.0, 8.0)]) == (6.0, 8.0)
