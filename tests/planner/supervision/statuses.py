"""A worker that trains, for the tests of what supervisors make of such reports."""

from planner.supervision.worker_process import WorkerStatus

RUNNING = WorkerStatus(
    state="running",
    code=None,
    signal="",
    asked=False,
    out_of_memory=False,
    error="",
    failed=False,
    step=41,
    doing="",
    frozen="",
    ended_age=0.0,
    told_age=2.0,
    step_seconds=0.5,
)
