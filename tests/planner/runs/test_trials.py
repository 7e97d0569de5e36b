import csv
import json
import pathlib
import re

import pytest

from paxtrain.errors import UserError
from paxtrain.model import parameters
from planner import convert
from planner.runs import published, trials

SHARED = pathlib.Path(__file__).resolve().parents[3].parent / "shared" / "data" / "trials"
ROW = {
    "cluster": "lab",
    "devices": 8,
    "devices_per_host": 4,
    "device_kinds": "A100;V100",
    "host_gbit": "100;50",
    "intra_gbit": 2400,
    "hidden": 1024,
    "heads": 16,
    "layers": 10,
    "seq": 512,
    "vocab": 50304,
    "global_batch": 32,
    "micro_batch": 2,
    "tp": 2,
    "dp": 2,
    "pp": 2,
    "stage_layers": "4;6",
    "recompute": 1,
    "dtype": "bf16",
    "seconds": 1.5,
}


def _file(tmp_path, *rows, columns=trials.COLUMNS):
    path = tmp_path / "trials.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**ROW, **row} for row in rows)
    return path


def test_reads_a_row(tmp_path):
    (trial,) = trials.read(_file(tmp_path, {"device_gb": 40}))
    assert trial.device_bytes == 40e9 and trial.host_bytes == (12.5e9, 6.25e9) and trial.intra_bytes == (300e9, 300e9)
    assert trial.device_kinds == ("A100", "V100") and trial.stage_layers == (4, 6)
    assert trial.recompute == "full" and trial.element_bytes == 2 and trial.seconds == 1.5
    assert trial.micro_batches == 8 and trial.hosts == 2
    assert trial.group == ("lab", 1024, 10, 8, 32) and (trial.hidden, trial.micro_batch, trial.tp) == (1024, 2, 2)


def test_optional_columns_may_be_missing_or_empty(tmp_path):
    required = [name for name in trials.COLUMNS if name not in trials.OPTIONAL]
    empty = dict.fromkeys(trials.OPTIONAL, "")
    for path in (_file(tmp_path, {"pp": 4, "dp": 1}, columns=required), _file(tmp_path, {"pp": 4, "dp": 1, **empty})):
        (trial,) = trials.read(path)
        assert trial.device_bytes is None and trial.host_bytes is None and trial.intra_bytes is None
        assert trial.device_kinds == ("", "")
        assert trial.stage_layers == (3, 3, 2, 2)


def test_a_row_says_how_its_pipelines_run(tmp_path):
    changes = {"schedule": "interleaved_1f1b", "virtual_stages": 5, "placement": "0;1;0;1"}
    (trial,) = trials.read(_file(tmp_path, changes))
    assert (trial.schedule, trial.virtual_stages, trial.placement) == ("interleaved_1f1b", 5, (0, 1, 0, 1))
    (trial,) = trials.read(_file(tmp_path, {"global_batch": 14, "data_micro_batches": "2;5"}))
    assert trial.data_micro_batches == (2, 5) and trial.micro_batches == 5


@pytest.mark.parametrize(
    "named, virtual_stages, schedule",
    [
        ("", "", ("1f1b", 1)),
        ("eager_1f1b", "4", ("eager_1f1b", 1)),  # which has no chunks
        ("interleaved_1f1b", "", ("interleaved_1f1b", 2)),
        ("1f1b:3", "", ("1f1b:3", 1)),
        ("1f1b:4", "", ("1f1b", 1)),  # more than two stages have in flight
        ("1f1b:", "", ("1f1b", 1)),
        ("mine.csv", "", ("1f1b", 1)),
        ("PipeDream-Flush", "", ("1f1b", 1)),
    ],
)
def test_schedules_of_others_count_as_1f1b(tmp_path, named, virtual_stages, schedule):
    (trial,) = trials.read(_file(tmp_path, {"schedule": named, "virtual_stages": virtual_stages}))
    assert (trial.schedule, trial.virtual_stages) == schedule


def test_a_table_is_old_or_new_if_it_cannot_be_written(tmp_path, monkeypatch):
    path = _file(tmp_path, {})
    before = path.read_bytes()

    def full(*_):
        raise OSError("no")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no"):
        trials.write(path, [ROW, ROW])
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "inf", "Inf", "nan"])
def test_what_was_not_run_has_no_seconds(tmp_path, text):
    rows = trials.read(_file(tmp_path, {"seconds": text}, {}))
    assert [row.seconds for row in rows] == [None, 1.5]


def test_spreadsheets_spaces_and_byte_order_marks_do_no_harm(tmp_path):
    path = _file(tmp_path, {"hidden": "1024.0", "seconds": " 1.5 "})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"cluster,", b"cluster , "))
    assert trials.read(path)[0].hidden == 1024


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": "big"}, "hidden must be a whole number from 1 on, got 'big'"),
        ({"layers": 0}, "layers must be a whole number"),
        ({"micro_batch": 1.5}, "micro_batch must be a whole number"),
        ({"tp": ""}, "tp must be a whole number"),
        ({"tp": "\u0662"}, "tp must be a whole number"),
        ({"experts": 8, "top_k": "two"}, "top_k must be a whole number from 1 on, got 'two'"),
        ({"experts": 8, "expert_ffn": "nan"}, "expert_ffn must be a whole number"),
        ({"hidden": "1_024"}, "hidden must be a whole number from 1 on, got '1_024'"),
        ({"stage_layers": "\u0664;6"}, "must be 2 counts"),
        ({"intra_gbit": "2_400"}, "intra_gbit must be above 0, got '2_400'"),
        ({"dp": 3}, "tp=2 x dp=3 x pp=2 must make devices=8"),
        ({"global_batch": 33}, "global_batch=33 must be a multiple of dp=2 x micro_batch=2"),
        ({"stage_layers": "4;5"}, "stage_layers=4;5 must be 2 counts"),
        ({"stage_layers": "10"}, "must be 2 counts"),
        ({"virtual_stages": "0"}, "virtual_stages must be a whole number"),
        ({"virtual_stages": 5000}, "virtual_stages must be 1,024 at most"),
        ({"data_micro_batches": "3;4"}, "data_micro_batches=3;4 must be 2 counts from 1 on"),
        ({"data_micro_batches": "16"}, "must be 2 counts"),
        ({"data_micro_batches": "16;0"}, "must be 2 counts from 1 on"),
        ({"data_micro_batches": "8;x"}, "must be 2 counts from 1 on"),
        ({"placement": "0;0;1"}, "placement=0;0;1 must name a host from 0 to 1 for each of the 4 tensor groups"),
        ({"placement": "0;0;0;1"}, "no host for more than devices_per_host=4"),
        ({"placement": "0;0;2;1"}, "must name a host from 0 to 1"),
        ({"layers": 1, "stage_layers": ""}, "layers=1 cannot fill pp=2 stages"),
        (
            {"recompute": "yes"},
            "recompute must be one of 0, 1, none, full, scores, half_layers, half_products, got 'yes'",
        ),
        ({"dtype": "int8"}, "dtype must be one of fp16"),
        ({"host_gbit": "100;0"}, "host_gbit must be above 0, got '0'"),
        ({"devices_per_host": 2, "intra_gbit": "1;2;3"}, "must be one entry or one for each of the 4 hosts"),
        ({"seconds": -1}, "seconds (empty or inf: not run) must be above 0, got '-1'"),
        ({"seconds": "OOM"}, "must be above 0, got 'OOM'"),
        ({"cluster": " "}, "cluster must have a name"),
    ],
)
def test_bad_values_are_named_with_their_line(tmp_path, change, message):
    with pytest.raises(UserError) as error:
        trials.read(_file(tmp_path, {}, change))
    assert f"{tmp_path / 'trials.csv'}, line 3: " in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match="cannot read the trials"):
        trials.read(tmp_path / "absent.csv")
    columns = [name for name in trials.COLUMNS if name not in ("hidden", "seconds", "host_gbit")]
    with pytest.raises(UserError, match="lacks the columns hidden, seconds; it needs"):
        trials.read(_file(tmp_path, {}, columns=columns))
    with pytest.raises(UserError, match="no usable row: none of 2 has seconds"):
        trials.read(_file(tmp_path, {"seconds": ""}, {"seconds": "inf"}))
    with pytest.raises(UserError, match="names a column twice: hidden"):
        trials.read(_file(tmp_path, {}, columns=[*trials.COLUMNS, "hidden"]))
    path = _file(tmp_path, {})
    path.write_text(path.read_text() + "lab,8,4\n")
    with pytest.raises(UserError, match=f"line 3: it must have {len(trials.COLUMNS)} cells"):
        trials.read(path)
    path.write_text("")
    with pytest.raises(UserError, match="lacks the columns cluster, devices"):
        trials.read(path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published trials are not here")
def test_converts_the_published_trials(tmp_path):
    amp = published.amp((SHARED / "amp_homogeneous.json").read_text())
    trials.write(tmp_path / "amp.csv", amp)
    rows = trials.read(tmp_path / "amp.csv")
    assert len(rows) == 52 and sum(row.seconds is None for row in rows) == 5
    assert all(sum(row.stage_layers) == 24 for row in rows)
    assert rows[6].stage_layers == (2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1)
    assert rows[0].host_bytes == (6.25e9,) * 4 and rows[0].seconds == 1.32
    trials.write(tmp_path / "vtrain.csv", published.vtrain((SHARED / "vtrain_single_node.csv").read_text()))
    rows = trials.read(tmp_path / "vtrain.csv")
    assert len(rows) == 1440 and rows[0].seconds == pytest.approx(0.372160408)
    assert all(row.recompute and row.hosts == 1 for row in rows)


def test_a_published_trial_that_makes_no_sense_is_named(tmp_path):
    """Without a check of the rows "4" nodes of 4 GPUs were 4444 devices."""
    config = {"stage_boundaries": [0, 30], "micro_batch": 1, "tp": 1, "dp": 16, "pp": 1, "global_batch": 32}
    cluster = {"nodes": 4, "gpus_per_node": 4, "inter_gbps": [50] * 4, "intra_gbps": [50] * 4}
    model = {"hidden": 1024, "seq": 1024, "layers": 24, "vocab": 52256}
    good = {"config": config, "model": model, "cluster": cluster, "measured_seconds": 1.32}
    source, out = tmp_path / "amp.json", tmp_path / "out.csv"
    source.write_text(json.dumps([good]))
    convert.main(["convert", str(source), str(out)])
    assert trials.read(out)[0].devices == 16
    before = out.read_bytes()
    for change, message in (({"nodes": "4"}, "must make devices=4444"), ({"nodes": 4.5}, "devices=18")):
        source.write_text(json.dumps([good, good | {"cluster": cluster | change}]))
        with pytest.raises(UserError, match=f"amp.json, trial 2: .*{message}"):
            convert.main(["convert", str(source), str(out)])
    assert out.read_bytes() == before


def test_what_cannot_be_converted(tmp_path):
    for name, text in (("a.json", "[{}]"), ("b.json", "no"), ("c.csv", "x,y\n1,2,z\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=f"{name} is none of the files"):
            convert.main(["convert", str(tmp_path / name), str(tmp_path / "out.csv")])
    with pytest.raises(UserError, match="INPUT and OUTPUT must be named, got 0 names"):
        convert.main(["convert"])


# --- Runs that others published ---------------------------------------------------------------------------------------

RUNS = SHARED.parent / "runs"


@pytest.mark.skipif(not RUNS.is_dir(), reason="published runs are not in this checkout")
def test_published_runs_are_read_as_they_are():
    ultrascale = published.read(RUNS / "ultrascale_1b_8b.csv")
    first = ultrascale[0]
    assert len(ultrascale) == 1553 and sum(row.failed for row in ultrascale) == 545
    assert (first.trainer, first.family, first.ffn, first.tp, first.sharding) == ("nanotron", "llama", 8192, 8, "none")
    assert first.sequence_parallel and first.memory == 5.79821e9 and first.seconds == 18.9767
    mpt = published.read(RUNS / "mpt_fsdp_a100.csv")
    assert len(mpt) == 139 and {row.sharding for row in mpt} == {"zero3"} and mpt[0].recompute == "full"
    # 26,274 tokens a second, as the page has it.
    assert mpt[0].global_batch * mpt[0].seq / mpt[0].seconds == pytest.approx(26274, rel=1e-4)
    bridge = published.read(RUNS / "megatron_bridge.csv")
    assert {"an expert axis of 16, 128 experts", ""} <= {row.beyond for row in bridge}
    assert {row.context for row in bridge if not row.beyond} == {1, 2}
    for row in (row for row in bridge if not row.beyond):
        assert row.model.layers == row.layers and row.precision in ("bf16", "fp8", "mxfp8", "nvfp4")


@pytest.mark.skipif(not RUNS.is_dir(), reason="published runs are not in this checkout")
def test_converted_runs_are_the_same_runs(tmp_path):
    for name in ("ultrascale_1b_8b", "mpt_fsdp_a100", "megatron_bridge"):
        source = RUNS / f"{name}.csv"
        convert.main(["convert", str(source), str(tmp_path / "table.csv")])
        assert trials.read(tmp_path / "table.csv") == published.read(source)


def test_parameters_of_a_published_model_are_its_own(tmp_path):
    """Llama 3.1 8B has 8,030,261,248 parameters (its page in Hugging Face's hub)."""
    row = ROW | {"family": "llama", "hidden": 4096, "heads": 32, "layers": 32, "vocab": 128256, "stage_layers": ""}
    row |= {"kv_heads": 8, "ffn": 14336, "global_batch": 32}
    (trial,) = trials.read(_file(tmp_path, row))
    ends = parameters.count(trial.model, "embedding", tables=2) + parameters.count(trial.model, "final_norm")
    assert 32 * parameters.count(trial.model) + ends == 8_030_261_248


@pytest.mark.parametrize(
    "change, message",
    [
        ({"family": "mamba"}, "smollm3, got 'mamba'"),
        ({"trainer": "mine"}, "trainer must be one of"),
        ({"sharding": "fsdp"}, "sharding must be one of none, zero1, zero2, zero3, got 'fsdp'"),
        ({"context": 2}, "tp=2 x dp=2 x pp=2 x context=2 must make devices=8"),
        ({"failed": "yes"}, "failed must be 0 or 1, got 'yes'"),
        ({"memory_gb": "-3"}, "memory_gb must be above 0, got '-3'"),
        ({"precision": "int4"}, "precision must be one of"),
        ({"tied_head": "2"}, "tied_head must be 0 or 1, got '2'"),
    ],
)
def test_bad_values_of_optional_columns(tmp_path, change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        trials.read(_file(tmp_path, change))
