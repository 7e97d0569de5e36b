"""Logs of nccl-tests are read as they were published, and refused if they are damaged or of something else."""

import numpy as np
import pytest

from paxtrain.errors import UserError
from planner.given import nccl_tests
from tests.planner.given import logs

RING = logs.DATA / "h100_2_hosts_all_reduce_perf.log"


def written(tmp_path, text, name="all_reduce_perf.log", **how):
    path = tmp_path / name
    path.write_text(text, **how) if isinstance(text, str) else path.write_bytes(text)
    return path


def refusal(path):
    with pytest.raises(UserError) as caught:
        nccl_tests.read(path)
    assert str(caught.value).startswith(f"nccl-tests log {path}") or str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "test", "ranks", "hosts", "device", "sizes", "peak"),
    [
        ("a100_1_host_sendrecv_perf.log", "sendrecv", 2, 1, "NVIDIA A100-SXM-64GB", 29, 73.83),
        ("h100_1_host_all_reduce_perf.log", "all_reduce", 8, 1, "NVIDIA H100 80GB HBM3", 6, 476.53),
        ("h100_2_hosts_all_reduce_perf.log", "all_reduce", 16, 2, "NVIDIA H100 80GB HBM3", 11, 102.27),
        ("h200_2_hosts_all_gather_perf.log", "all_gather", 16, 2, "NVIDIA H200", 24, 332.58),
        ("dgx_h100_2_hosts_all_reduce_perf.log", "all_reduce", 16, 2, "NVIDIA H100 80GB HBM3", 32, 472.35),
    ],
)
def test_published_logs_are_read(name, test, ranks, hosts, device, sizes, peak):
    """Plain, behind the marks of srun and of mpirun, and with NCCL's own lines in between."""
    log = nccl_tests.read(logs.DATA / name)
    assert (log.test, log.ranks, len(log.names), set(log.devices), len(log.sizes)) == (
        test,
        ranks,
        hosts,
        {device},
        sizes,
    )
    assert log.busbw.max() == pytest.approx(peak * 1e9)
    algbw = log.sizes / log.seconds
    large = log.sizes >= 1 << 24
    np.testing.assert_allclose(log.busbw[large], algbw[large] * logs.factor(test, ranks), rtol=1e-3)


def test_the_quicker_time_of_a_size_counts():
    log = nccl_tests.read(logs.DATA / "dgx_h100_2_hosts_all_reduce_perf.log")
    assert log.sizes[0] == 8
    assert log.seconds[0] == pytest.approx(40.22e-6)  # not 172.7, the first call's


def test_line_ends_encodings_and_colors_do_not_matter(tmp_path):
    text = RING.read_text()
    good = nccl_tests.read(RING)
    for number, changed in enumerate(
        (
            text.replace("\n", "\r\n").encode(),
            text.encode("utf-16"),
            b"\xef\xbb\xbf" + text.encode(),
            "".join(f"\x1b[32m{line}\x1b[0m\n" for line in text.splitlines()).encode(),
        )
    ):
        log = nccl_tests.read(written(tmp_path, changed, f"{number}_all_reduce_perf.log"))
        np.testing.assert_array_equal(log.seconds, good.seconds)
        assert log.hosts == good.hosts


def test_older_versions_print_no_group_no_root_and_an_error(tmp_path):
    lines = [
        line.replace(" Group  0", "").replace("      -1 ", " ")
        for line in logs.log("all_reduce", ["a", "b"], 1e-5, 1e10).splitlines()
    ]
    text = "\n".join(line.replace("      0", "  1e-06") if "float" in line else line for line in lines)
    assert nccl_tests.read(written(tmp_path, text)).test == "all_reduce"


def test_a_log_is_refused_if_it_was_not_built_with_mpi():
    said = refusal(logs.DATA / "v100_without_mpi_all_reduce_perf.log")
    assert "rank 0 comes twice" in said and "MPI=1" in said


def test_damaged_logs_are_refused(tmp_path):
    text = RING.read_text()
    row = next(line for line in text.splitlines() if " 1073741824 " in line)
    for changed, reason in {
        "": "is empty",
        "\n".join(text.splitlines()[:-2]): "cut short",
        text[: text.index("22918")]: "cut short",
        text.replace("   N/A\n", "      3\n"): "3 wrong values",
        text.replace("values : 0 OK", "values : 7 FAILED"): "7 values were out of bounds",
        text.replace(row, row.replace("22920", "  nan").replace("22918", "  nan")): "time of nan",
        text.replace(row, row.replace("22920", "0.00").replace("22918", "0.00")): "time of 0",
        text.replace(row, row.replace(".", ",")): "decimal commas",
        text.replace(row, row.replace("46.85", "374.8")): "in Gbit/s",
        text.replace(row, row.replace("46.85", "40.00")): "another unit or of other times",
        text.replace(row, row.replace("22920", "1.5.2")): "cut short",
        text.replace(row, row.replace("22920", "\u0661\u0662")): "cut short",
        text.replace("N/A", "9" * 5000): "99999999999999999999 wrong values",
        text.replace("Rank  3", "Rank  2"): "rank 2 comes twice",
        text.replace("Rank  3", "Ran"): "rank 3 is missing",
        "\n".join(line for line in text.splitlines() if "Rank" not in line): "there are no lines",
        "\n".join(line for line in text.splitlines() if "float" not in line): "no row of times",
        "\n".join(line for line in text.splitlines() if "Rank" not in line or "Rank  0" in line): "one rank",
    }.items():
        assert reason in refusal(written(tmp_path, changed)), reason


def test_logs_of_other_tests_are_refused(tmp_path):
    text = RING.read_text()
    for name, reason in {
        "broadcast_perf.log": "broadcast_perf is not read here",
        "alltoall_perf.log": "alltoall_perf is not read here",
        "sendrecv_perf.log": "sendrecv over 16 ranks makes",
        "all_gather_perf.log": "is it the log of another test",
    }.items():
        assert reason in refusal(written(tmp_path, text, name))
    assert "broadcast_perf is not" in refusal(written(tmp_path, "# Collective test starting: broadcast_perf\n" + text))


def test_the_bandwidths_tell_an_all_reduce_but_no_other_test(tmp_path):
    assert nccl_tests.read(written(tmp_path, RING.read_text(), "log.txt")).test == "all_reduce"
    for test in ("all_gather", "reduce_scatter", "sendrecv"):
        text = logs.log(test, ["a"] * 8, 1e-5, 1e11).replace(f"{test}_perf", "it")
        assert "nothing says which test" in refusal(written(tmp_path, text, "log.txt"))
    two = logs.log("all_reduce", ["a"] * 2, 1e-5, 1e11).replace("all_reduce_perf", "it")
    assert "look alike" in refusal(written(tmp_path, two, "log.txt"))


def test_what_is_no_text_is_refused(tmp_path):
    assert "cannot read" in refusal(tmp_path / "gone.log")
    assert "is no file" in refusal(tmp_path)
    assert "cannot read" in refusal(written(tmp_path, b"\x1f\x8b" + b"\0" * 40))
    assert "there are no lines" in refusal(written(tmp_path, bytes(range(256)) * 10))
