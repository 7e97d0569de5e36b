"""The seconds that runs were made with come back from their traces; what a trace does not tell is one sentence."""

import gzip
import json
import shutil

import numpy as np
import pytest

from paxtrain.errors import UserError
from planner.traces import compute_row, nsys, phases, torch_trace, xla_trace
from planner.traces.kernels import NOTHING, SOME, WHOLE_LAYERS, TracedKernel, busy, part_seconds
from tests.planner.given.logs import DATA
from tests.planner.traces.runs import Run, write


def read(tmp_path, run, kind="torch", **how):
    path = tmp_path / f"trace.{kind}"
    path.unlink(missing_ok=True)
    if kind == "nsys":
        run.nsys(path, **how)
    else:
        write(path, getattr(run, kind)(**how))
    return compute_row.read(path)


def refusal(path):
    with pytest.raises(UserError) as caught:
        compute_row.read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["torch", "nsys"])
@pytest.mark.parametrize("run", [Run(), Run(layers=1, passes=1, steps=1), Run(layers=5, passes=4, every=2e-4)])
def test_the_seconds_of_a_run_come_back(tmp_path, kind, run):
    """Whether the device waits for launches or not; clipping is neither F nor the optimizer."""
    trace = read(tmp_path, run, kind)
    assert (trace.passes, trace.steps, trace.head) == (run.passes * run.steps, run.steps, True)
    assert trace.recomputes == NOTHING and trace.device == "NVIDIA H100 80GB HBM3"
    found = part_seconds(trace, run.layers, trace.passes, collectives=False)
    np.testing.assert_allclose(
        [found.forward, found.backward, found.head, found.embedding, found.optimizer],
        [run.forward, run.backward, 3 * run.logits + 2e-4, 1.5e-4, run.optimizer],
        rtol=1e-3,
    )
    assert found.every == pytest.approx(run.every, rel=1e-2)


def test_waits_for_launches_are_idle_time(tmp_path):
    """A layer's kernels take 750 and 250 us, and a launch every 1 ms leaves 50% idle."""
    found = part_seconds(read(tmp_path, run := Run(every=1e-3, layers=20)), 20, run.passes * run.steps, False)
    assert found.idle == pytest.approx(0.5, abs=0.02)
    assert part_seconds(read(tmp_path, Run()), 3, 4, False).idle < 0.01


def test_steps_that_are_cut_off_do_not_count(tmp_path):
    """Only the second of two steps is marked."""
    values = Run().torch()
    values["traceEvents"] = [event for event in values["traceEvents"] if event["name"] != "ProfilerStep#0"]
    write(tmp_path / "trace", values)
    trace = compute_row.read(tmp_path / "trace")
    assert (trace.passes, trace.steps) == (2, 1)
    assert part_seconds(trace, 3, 2, False).forward == pytest.approx(1e-3, rel=1e-3)


def test_a_trace_without_marks_of_steps_counts_as_one(tmp_path):
    trace = read(tmp_path, Run(), steps=False)
    assert (trace.passes, trace.steps) == (4, 2)


def test_collectives_count_if_they_are_of_tensor_parallelism(tmp_path):
    trace = read(tmp_path, Run(collective=3e-4))
    assert part_seconds(trace, 3, 4, False).forward == pytest.approx(1e-3, rel=1e-3)
    assert part_seconds(trace, 3, 4, True).forward == pytest.approx(1.3e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (("aten::linear", "aten::gelu"), WHOLE_LAYERS),
        (("aten::scaled_dot_product_attention",), SOME),
        (("aten::gelu",), NOTHING),
    ],
)
def test_what_b_runs_again_counts_as_b_and_is_told(tmp_path, again, expected):
    trace = read(tmp_path, run := Run(again=again))
    assert trace.recomputes == expected
    assert part_seconds(trace, 3, 4, False).backward == pytest.approx(run.forward + run.backward, rel=1e-3)


def test_layers_alone_have_no_head(tmp_path):
    trace = read(tmp_path, Run(head=False))
    assert not trace.head and trace.passes == 4
    assert part_seconds(trace, 3, 4, False).head == 0


def test_threads_of_the_autograd_engine_tell_b_without_ranges(tmp_path):
    trace = read(tmp_path, run := Run(head=False), "nsys", ranges=False)
    found = part_seconds(trace, 3, trace.passes, False)
    assert found.backward == pytest.approx(run.backward, rel=1e-3)
    run.nsys(tmp_path / "bare", ranges=False, threads=False)
    assert "nothing tells F from B" in refusal(tmp_path / "bare")


def in_order(order, every=1.0):
    """Return ranges and launches of ten kernels for each F and each B, in an order such as "FFB"."""
    operators, launches = [], []
    for place, letter in enumerate(order):
        name = {"F": "forward_step", "B": "backward_step"}[letter]
        operators.append(phases.Operator(name, 1, place * every, (place + 0.9) * every))
        times = [place * every + 0.05 * (i + 1) for i in range(10)]
        launches += [phases.KernelLaunch(1, time, "k", time + 0.01, time + 0.02) for time in times]
    return operators, launches


def test_a_stage_of_a_pipeline_does_not_say_its_passes():
    """Two F in a row look like one that is twice as long; all kernels keep their phases."""
    found = phases.label(*in_order("FFBFBB"))
    assert found.passes == 0
    assert [kernel.phase for kernel in found.kernels].count("forward") == 30
    assert [kernel.phase for kernel in found.kernels].count("backward") == 30
    assert phases.label(*in_order("FBFBFB")).passes == 3


def test_what_another_thread_launches_meanwhile_is_neither():
    """As a thread that prepares the next batch does, in the middle of B."""
    operators, launches = in_order("FB")
    launches += [phases.KernelLaunch(2, 1.22, "cast", 5.0, 5.1)]
    found = phases.label(operators, launches)
    assert found.passes == 1
    assert sorted(kernel.phase for kernel in found.kernels) == ["backward"] * 10 + ["forward"] * 10 + ["other"]


def test_ranges_named_after_the_parts_tell_them():
    """As people put nvtx ranges around parts of their own step."""
    operators = [
        phases.Operator(name, 1, start, start + 1.0)
        for start, name in enumerate(("forward-backward", "forward_step", "backward_step", "optimizer"))
    ]
    operators[0] = operators[0]._replace(end=3.0)
    launches = [phases.KernelLaunch(1, start + 0.5, "k", start + 0.6, start + 0.7) for start in (1.0, 2.0, 3.0)]
    found = phases.label(operators, launches)
    assert [kernel.phase for kernel in found.kernels] == ["forward", "backward", "optimizer"]
    assert (found.passes, found.head) == (1, False)


@pytest.mark.parametrize("loop_of_passes", [False, True])
@pytest.mark.parametrize("passes", [4, 8])
def test_scanned_layers_of_jax_are_told_from_the_rest(tmp_path, passes, loop_of_passes):
    trace = read(tmp_path, run := Run(), "xla", loop_of_passes=loop_of_passes)
    assert trace.head and trace.passes == 0 and trace.recomputes is None
    found = part_seconds(trace, 3, passes, False)
    assert found.forward == pytest.approx(run.forward * 4 / passes, rel=1e-3)
    assert found.backward == pytest.approx(run.backward * 4 / passes, rel=1e-3)
    assert not read(tmp_path, run, "xla", loop_of_passes=loop_of_passes, scanned=False).head


def test_gzipped_traces_are_read(tmp_path):
    write(tmp_path / "plain", Run().torch())
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    assert compute_row.read(tmp_path / "packed.json.gz").kernels == compute_row.read(tmp_path / "plain").kernels


def test_a_published_trace_of_a_backward_alone_has_no_pass():
    trace = compute_row.read(DATA / "torch_backward.json")
    assert (trace.passes, len(trace.kernels), trace.device) == (0, 1, "")
    assert trace.kernels[0].end - trace.kernels[0].start == pytest.approx(45e-6, abs=1e-6)


def test_sums_of_nsys_are_refused():
    assert "do not tell F from B; give the sqlite export" in refusal(DATA / "nsys_kern_sum.csv")


def test_what_is_no_trace_is_refused(tmp_path):
    good, path = Run().torch(), tmp_path / "trace"

    def events(change):
        return {"traceEvents": [change(dict(event)) for event in good["traceEvents"]]}

    def other_gpus(event):
        number = event["args"].get("correlation", 0)
        return event | {"args": event["args"] | {"device": number % 2}} if event.get("cat") == "kernel" else event

    cases = {
        "no kernels of a GPU": events(lambda event: event | {"cat": "cpu_op"}),
        "of which no launch is there": events(
            lambda event: event | ({"args": {}} if event.get("cat") == "kernel" else {})
        ),
        "kernels of 2 GPUs (0, 1)": events(other_gpus),
        "no times": events(lambda event: event | {"dur": "long"}),
    }
    for reason, values in cases.items():
        write(path, values)
        assert reason in refusal(path), reason
    for content, reason in {
        "": "is empty",
        json.dumps(good)[:5000]: "no whole JSON",
        "[" * 100_000: "no whole JSON",
        "{}": "no kernels of a GPU",
        "[1, 2]": "no kernels of a GPU",
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "args": []}]}': "no kernels of a GPU",
    }.items():
        path.write_text(content)
        assert reason in refusal(path), reason
    assert "cannot read" in refusal(tmp_path / "gone")


def test_what_is_no_export_of_nsys_is_refused(tmp_path):
    path, other = tmp_path / "good", tmp_path / "other"
    Run().nsys(path)
    other.write_bytes(nsys.MAGIC + b"x" * 5000)
    assert "no whole sqlite export" in refusal(other)
    other.write_bytes(path.read_bytes()[:9000])
    assert "no whole sqlite export" in refusal(other)
    other.write_bytes(path.read_bytes().replace(b"TABLE StringIds", b"TABLE \x86\x90ringIds"))
    assert "no whole sqlite export" in refusal(other)

    def changed(*statements):
        import sqlite3

        shutil.copy(path, other)
        with sqlite3.connect(other) as base:
            for statement in statements:
                base.execute(statement)
        base.close()
        return refusal(other)

    assert "it has no table CUPTI_ACTIVITY_KIND_KERNEL" in changed("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    assert "kernels of 2 GPUs (0, 1)" in changed("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = correlationId % 2")
    assert "kernels of 0 GPUs" in changed("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
    assert "no launch of its kernels" in changed("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    assert "in place of int" in changed("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")


def test_kernels_that_run_at_once_count_once():
    def kernel(start, end):
        return TracedKernel(start, end, start, "forward")

    assert busy([kernel(0, 2), kernel(1, 3), kernel(5, 6), kernel(5.2, 5.4)]) == 4


def test_traces_are_told_apart():
    assert torch_trace.is_trace(Run().torch()) and not torch_trace.is_trace(Run().xla())
    assert xla_trace.is_trace(Run().xla()) and not xla_trace.is_trace(Run().torch())
