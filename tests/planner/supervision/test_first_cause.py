"""The rule: what explains the others comes before what the others explain, and all hosts say the same sentence."""

import asyncio
import dataclasses
import itertools

import pytest

from paxtrain.errors import UserError
from planner.measure import process_group, reachability
from planner.start import rendezvous
from planner.supervision.first_cause import REFUSED, FaultCause, HostReport, first, is_cascade
from planner.supervision.worker_process import WorkerStatus
from tests.planner.ports import free_ports
from tests.planner.supervision.statuses import RUNNING

NAMES = ("pax0", "pax1", "pax2", "pax3")
GLOO = "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer [10.77.0.3]:26321"
SERVICE = "Terminating process because the JAX distributed service detected fatal errors."


def ended(**changes) -> WorkerStatus:
    return dataclasses.replace(RUNNING, state="ended", ended_age=1.0, **changes)


def failed(error: str, **changes) -> WorkerStatus:
    return dataclasses.replace(RUNNING, failed=True, error=error, ended_age=1.0, **changes)


def reports(*workers: WorkerStatus | None, **changes) -> dict[int, HostReport]:
    """Return a report of each host except those given as None; `changes` are by host, pax1={...}."""
    made = {
        rank: HostReport(name=NAMES[rank], worker=worker, final=True, **changes.get(NAMES[rank], {}))
        for rank, worker in enumerate(workers)
        if worker is not None
    }
    return {rank: HostReport.from_json(report.to_json()) for rank, report in made.items()}  # as they travel


def judged(found: dict[int, HostReport], **more) -> FaultCause:
    return first(found, NAMES[: max(len(found), 4)], **more)


CASCADES = (failed(GLOO), ended(code=None, signal="SIGABRT", error=SERVICE), ended(code=1, error=GLOO))


@pytest.mark.parametrize(
    ("worker", "kind", "words"),
    [
        (ended(signal="SIGKILL"), "killed", "pax2: the worker was killed by SIGKILL, after step 41, 1.0 s ago"),
        (ended(signal="SIGKILL", out_of_memory=True), "out of memory", "killed by the kernel, because its host"),
        (ended(signal="SIGSEGV", error="Fatal Python error: Segmentation fault"), "killed", "ended by SIGSEGV"),
        (
            failed("OSError: [Errno 28] No space left on device: 'x'", doing="saving a checkpoint"),
            "disk full",
            "found its disk full while saving a checkpoint, after step 41",
        ),
        (
            failed('ValueError: RESOURCE_EXHAUSTED: Error writing "x" [OS error 28: ENOSPC No space left on device]'),
            "disk full",
            "found its disk full",
        ),
        (
            failed("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"),
            "out of memory",
            "ran out of memory",
        ),
        (ended(signal="SIGABRT", error="std::bad_alloc"), "out of memory", "ran out of memory"),
        (
            ended(code=2, error="error: mesh.data must be positive, got 0"),
            "bad input",
            "was given bad input, after step 41, 1.0 s ago (mesh.data must be positive, got 0)",
        ),
        (failed("UserError: no checkpoint is good"), "bad input", "(no checkpoint is good)"),
        (failed("ZeroDivisionError: division by zero"), "exception", "failed, after step 41"),
        (failed("OSError: [Errno 11] Resource temporarily unavailable"), "exception", "failed"),
        (ended(code=7, error="no luck"), "exit", "failed with exit code 7, after step 41, 1.0 s ago (no luck)"),
        (ended(signal="SIGTERM", asked=True), "stopped", "was told to end and ended by SIGTERM"),
    ],
)
def test_a_reason_of_its_own_comes_before_all_others(worker, kind, words):
    """It also comes before earlier events, before a lost host and before a cut link."""
    earlier = [dataclasses.replace(cascade, ended_age=9.0) for cascade in CASCADES]
    cause = judged(reports(earlier[0], earlier[1], worker, earlier[2]))
    assert (cause.kind, cause.hosts, cause.step) == (kind, ("pax2",), 41)
    assert words in cause.sentence and "\n" not in cause.sentence
    without_3 = reports(earlier[0], earlier[1], worker, pax0={"unreachable": {1: "no answer", 3: "no answer"}})
    assert judged(without_3).kind == kind


def _no_answer() -> str:
    with pytest.raises(UserError) as raised:
        asyncio.run(rendezvous._call(("127.0.0.1", free_ports(1)[0]), b"secret" * 6, 1, 0.3))
    return str(raised.value)


@pytest.mark.parametrize(
    "said",
    [
        lambda: f"process 3 has not answered for 60 s; {process_group.ADVICE}",
        lambda: f"process 0 has waited 48 s for process 3; {process_group.ADVICE}",
        lambda: reachability.unreachable(list(NAMES), ["10.0.0.1"] * 4, [(0, 3, "timed out")]),
        lambda: reachability.unreachable(list(NAMES), ["10.0.0.1"] * 4, [(3, 0, "x"), (3, 1, "x")]),
        lambda: rendezvous.missing_sentence([3], {0: "pax0"}, NAMES, "pax0:1", 300.0),
        _no_answer,
    ],
    ids=["no answer", "waited", "cannot be reached", "cannot reach", "not come", "no process 0"],
)
def test_who_waits_for_another_one_before_training_has_not_been_given_bad_input(said):
    """The job is then tried again, and the host that is lost or stands still is named."""
    waited = ended(code=2, error=f"error: {said()}", step=None)
    cause = judged(reports(waited, waited, waited, RUNNING))
    assert cause.kind == "collective" and "the worker did not reach all others before the first step" in cause.sentence
    silent = {"unreachable": {3: "no answer for 2 s"}, "silences": {3: (62.0, 0.0)}}
    cause = judged(reports(waited, waited, waited, pax0=silent, pax1=silent, pax2=silent))
    assert (cause.kind, cause.leave_out) == ("lost", ("pax3",))
    frozen = dataclasses.replace(RUNNING, step=None, doing="starting", frozen="waiting for a disk", told_age=65.0)
    assert judged(reports(waited, waited, waited, frozen)).kind == "frozen"
    refused = ended(code=2, error="error: --out=x cannot be written; name another folder", step=None)
    assert judged(reports(waited, waited, waited, refused)).hosts == ("pax3",)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_several_reasons_the_earliest_is_the_first(order):
    ages = {0: 0.5, 1: 3.0, 2: 1.5}
    found = reports(*[dataclasses.replace(ended(signal="SIGKILL"), ended_age=ages[i]) for i in order], RUNNING)
    assert judged(found).hosts == (NAMES[order.index(1)],)


def test_ages_grow_on_the_way():
    """The report of the host that failed first arrives last. It is old by then, so the host still counts as first."""
    killed = ended(signal="SIGKILL")
    found = reports(killed, dataclasses.replace(killed, ended_age=0.8), RUNNING, RUNNING)
    assert judged(found).hosts == ("pax0",)
    assert judged(found | {1: found[1].older(0.5)}).hosts == ("pax1",)


def test_a_host_that_nobody_reaches():
    unreachable = {"unreachable": {3: REFUSED}}
    cause = judged(reports(*CASCADES, pax0=unreachable, pax1=unreachable, pax2=unreachable))
    assert (cause.kind, cause.hosts, cause.leave_out) == ("lost", ("pax3",), ("pax3",))
    assert cause.sentence.startswith("pax3 is gone: its worker and its supervisor have ended without a word")
    assert "planner.plan --without=pax3" in cause.sentence
    silent = {"unreachable": {3: "no answer for 2 s"}, "silences": {3: (8.0, 0.0)}}
    cause = judged(reports(*CASCADES, pax0=silent, pax1=silent, pax2=silent))
    assert cause.sentence.startswith("pax3 has not been heard by any other host for 8.0 s: down, or without a network")


def test_processes_of_a_machine_that_is_gone_name_the_machine_to_plan_without():
    names = ["n1:20000", "n1:20001", "n2:20000", "n2:20001"]
    found = reports(*CASCADES[:2], pax0={"unreachable": {2: REFUSED, 3: REFUSED}})
    cause = first(found, names, machines=["n1", "n1", "n2", "n2"])
    assert (cause.hosts, cause.leave_out) == (("n2:20000", "n2:20001"), ("n2",))
    assert "n2:20000 and n2:20001 are gone" in cause.sentence and "--without=n2)" in cause.sentence


def test_both_sides_of_a_broken_network_name_the_same_hosts():
    """Both name the smaller side, and of two halves the one without the first host."""
    silent = "no answer for 2 s"
    alone = reports(None, None, None, failed(GLOO), pax3={"unreachable": dict.fromkeys((0, 1, 2), silent)})
    others = reports(*CASCADES, **{name: {"unreachable": {3: silent}} for name in NAMES[:3]})
    assert judged(alone).hosts == judged(others).hosts == ("pax3",)
    low = reports(CASCADES[0], CASCADES[1], pax0={"unreachable": {2: silent, 3: silent}})
    high = reports(None, None, CASCADES[0], CASCADES[1], pax2={"unreachable": {0: silent, 1: silent}})
    assert judged(low).hosts == judged(high).hosts == ("pax2", "pax3")
    both = first({0: low[0]}, NAMES[:2]), first({1: dataclasses.replace(high[2], name="pax1")}, NAMES[:2])
    assert both[0].hosts == both[1].hosts == ("pax1",)


def test_a_host_that_has_not_come():
    cause = first({1: HostReport("pax1")}, NAMES, joined=False)
    assert cause.hosts == ("pax0", "pax2", "pax3")
    assert cause.sentence.startswith("pax0, pax2 and pax3 have not come: no supervisor there has been heard")
    up = first({1: HostReport("pax1", unreachable={0: REFUSED})}, NAMES, joined=False)
    assert up.hosts == ("pax0",)


def test_a_link_between_two_hosts_that_others_hear():
    cut = {
        "pax1": {"unreachable": {2: "No route to host"}, "silences": {2: (8.25, 0.0)}},
        "pax2": {"unreachable": {1: "no answer for 2 s"}, "silences": {1: (8.0, 0.0)}},
    }
    cause = judged(reports(CASCADES[0], CASCADES[1], CASCADES[2], CASCADES[0], **cut))
    assert (cause.kind, cause.hosts, cause.leave_out) == ("link", ("pax1", "pax2"), ("pax2",))
    words = "the link between pax1 and pax2 carries nothing for 8.2 s, while other hosts hear both, after step 41"
    assert cause.sentence.startswith(words)
    one_way = judged(reports(CASCADES[0], CASCADES[1], CASCADES[2], CASCADES[0], pax1=cut["pax1"]))
    assert one_way.hosts == ("pax1", "pax2")


def test_several_links_of_one_host():
    cut = {"pax1": {"unreachable": {0: "no answer", 2: "no answer"}}}
    cause = judged(reports(*CASCADES, CASCADES[0], **cut))
    assert cause.sentence.startswith("each of the links pax0 - pax1 and pax1 - pax2 carries nothing")
    assert cause.leave_out == ("pax1",)


def test_a_link_that_carries_again():
    cause = judged(reports(*CASCADES, CASCADES[0], pax1={"silences": {2: (9.3, 2.1)}}))
    assert cause.kind == "link" and "carried nothing for 9.3 s until 2.1 s ago" in cause.sentence


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"frozen": "stopped by a signal", "told_age": 60.0}, "frozen", "pax1: the worker has been stopped by a"),
        ({"doing": "saving a checkpoint", "told_age": 60.0}, "busy", "has been saving a checkpoint for 60.0 s"),
        ({"step": 40, "told_age": 61.0}, "stalled", "has stood still for 61.0 s, behind all others, after step 40"),
    ],
)
def test_a_worker_for_which_the_others_wait(changes, kind, words):
    waiting = dataclasses.replace(RUNNING, told_age=60.0)
    hung = {name: {"hung": True} for name in NAMES}
    cause = judged(reports(waiting, dataclasses.replace(RUNNING, **changes), waiting, waiting, **hung))
    assert (cause.kind, cause.hosts) == (kind, ("pax1",))
    assert words in cause.sentence
    if kind != "stalled":  # also if the others' collectives gave up before
        found = reports(CASCADES[0], dataclasses.replace(RUNNING, **changes), CASCADES[1], CASCADES[2])
        assert judged(found).kind == kind


def test_a_worker_that_compiles_while_the_others_give_up():
    """All are before their first step, so none counts as being behind."""
    compiling = dataclasses.replace(RUNNING, step=None, doing="compiling", told_age=23.0)
    gave_up = dataclasses.replace(CASCADES[0], step=None, doing="starting")
    cause = judged(reports(gave_up, compiling, gave_up, dataclasses.replace(compiling, told_age=22.0)))
    assert (cause.kind, cause.hosts, cause.step) == ("busy", ("pax1",), None)
    assert (
        "the worker has been compiling for 23.0 s, and the others wait for it, before the first step" in cause.sentence
    )
    assert "--link_timeout" in cause.sentence


def test_a_slow_host_for_which_the_others_gave_up():
    cause = judged(reports(CASCADES[0], RUNNING, CASCADES[1], CASCADES[2], pax1={"slow": 4.2}))
    assert cause.kind == "slow" and "pax1: its CPU takes 4.2 times as long as the others'" in cause.sentence


def test_where_nothing_is_known_nobody_is_blamed():
    waiting = dataclasses.replace(RUNNING, told_age=60.0)
    cause = judged(reports(waiting, waiting, waiting, waiting, **{name: {"hung": True} for name in NAMES}))
    assert (cause.kind, cause.hosts) == ("stalled", ())
    assert cause.sentence.startswith("no worker has finished a step for 60.0 s, though every host answers")


def test_cascades_alone_name_the_earliest():
    later = [dataclasses.replace(cascade, ended_age=0.5) for cascade in CASCADES]
    cause = judged(reports(later[0], later[1], CASCADES[0], later[2]))
    assert (cause.kind, cause.hosts) == ("collective", ("pax2",))
    assert GLOO in cause.sentence


@pytest.mark.parametrize(
    ("worker", "cascade"),
    [
        *((worker, True) for worker in CASCADES),
        (ended(code=2, error="error: process 3 found bad input; its own output says what"), True),
        (ended(code=2, error="error: the processes did not find each other within 9 s (process 1 of 2)"), True),
        (ended(code=2, error="error: n3 has not answered for 60 s; see whether its host is up"), True),
        (failed("UserError: cannot join the other processes: DEADLINE_EXCEEDED: Barrier timed out"), True),
        (failed("UserError: cannot join the other processes: no such host"), False),
        (ended(code=2, error="error: --out=/preempt/nccl is not the same folder on all nodes"), False),
        (ended(signal="SIGSEGV", error=GLOO), True),
        (ended(signal="SIGKILL", error=GLOO), False),
        (failed("OSError: [Errno 28] No space left on device: '/nccl'"), False),
        (failed("FileNotFoundError: [Errno 2] No such file or directory: 'barrier'"), False),
        (ended(code=1, error="ValueError: shapes differ"), False),
    ],
)
def test_what_is_a_cascade(worker, cascade):
    assert is_cascade(worker) is cascade


def test_a_worker_that_ended_well_is_no_cause():
    done = ended(code=0)
    assert judged(reports(done, ended(signal="SIGKILL"), done, done)).hosts == ("pax1",)
    waiting = dataclasses.replace(RUNNING, doing="finishing", told_age=90.0)
    assert judged(reports(done, done, waiting, done, pax2={"hung": True})).hosts == ("pax2",)


def test_a_worker_that_ended_well_too_early():
    cause = judged(
        reports(CASCADES[0], CASCADES[1], dataclasses.replace(ended(code=0, step=30), ended_age=1.2), CASCADES[2])
    )
    assert (cause.kind, cause.hosts, cause.step) == ("exit", ("pax2",), 30)
    assert "ended with exit code 0 while others were at work, after step 30" in cause.sentence
