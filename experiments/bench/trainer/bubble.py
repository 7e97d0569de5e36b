"""The pipeline's bubble, measured over two processes."""

import json
import statistics

import jax

from experiments.bench.trainer import two_processes
from experiments.bench.trainer.steps import PipelinedStep, configuration, interleave
from paxtrain.schedule.schedules import spec_of


def bubble(repeats: int) -> None:
    """Print ratios of pipe=2's step time to its bubble-free part, over two processes on separate cores.

    Args:
        repeats: steps per figure, of which the median counts.
    """
    output = two_processes.run_two("experiments.bench.trainer", repeats)
    if output is None:
        print("\nbubble: skipped, it needs two cores")
        return
    print(f"\nbubble, pipe=2 over two processes, one per core, median of {repeats} steps: step time over m x slope")
    print(f"  {'schedule':<14}{'m':>4}{'seconds':>10}{'measured':>10}{'ideal':>8}")
    measured = {schedule: {int(m): s for m, s in seconds.items()} for schedule, seconds in output.items()}
    few, many = sorted(measured["eager_1f1b"])[-2:]
    # Seconds of one more micro-batch. All schedules share the figure, so that a stall in the steady state shows.
    slope = min((times[many] - times[few]) / (many - few) for times in measured.values())
    for schedule, times in measured.items():
        for m, value in times.items():
            ideal = (m + (1 / 3 if spec_of(schedule).splits else 1)) / m
            print(f"  {schedule:<14}{m:>4}{value:>10.4f}{value / (m * slope):>10.3f}{ideal:>8.3f}")


def worker(process: int, coordinator: str, repeats: int) -> None:
    """Time steps as one of the two processes, and print the medians by schedule and number of micro-batches as JSON.

    Args:
        process: number of this process, 0 or 1.
        coordinator: HOST:PORT at which the processes meet.
        repeats: steps per figure.
    """
    two_processes.enter(process, coordinator)
    cases = [(schedule, m) for schedule in ("eager_1f1b", "1f1b", "zb_h1") for m in (2, 4, 8)]
    steps = {case: PipelinedStep(configuration((1, 2, 1), case[1], schedule=case[0]), jax.devices()) for case in cases}
    result: dict[str, dict[int, float]] = {}
    for (schedule, m), values in interleave(steps, repeats).items():
        result.setdefault(schedule, {})[m] = statistics.median(values)
    print(json.dumps(result), flush=True)
