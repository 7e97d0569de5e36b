"""Benchmarks of the planner: python -m experiments.bench.planner [--sections=executor,placement,speed].

executor         the simulator beside the executor: pipe=2 over two real processes, one per core, every schedule;
                 compute and links are profiled on those two processes in the same run
placement        placements beside exhaustive search, and their gains on measured links
placement_large  placements on 128 and 1,024 hosts; not run by default
speed            whole dry runs for 128, 1,024 and 8,192 devices
"""

from collections.abc import Sequence

from absl import flags

from experiments.bench.planner import executor, placement, speed
from paxtrain.command_line import run
from paxtrain.errors import UserError

SECTIONS = ("executor", "placement", "placement_large", "speed")
DEFAULT = ("executor", "placement", "speed")
HINT = f"choose with --sections={','.join(SECTIONS)}"


def main(argv: Sequence[str]) -> None:
    """Run the sections."""
    f = flags.FLAGS
    if f.worker is not None:
        executor.worker(f.worker, f.coordinator, f.repeats)
        return
    for section in f.sections:
        if section not in SECTIONS:
            raise UserError(f"unknown section {section!r}; known are {', '.join(SECTIONS)}")
    for section in f.sections:
        if section == "executor":
            executor.executor(f.repeats)
        elif section == "placement":
            placement.exhaustive(f.seeds)
            placement.measured(f.cluster)
        elif section == "placement_large":
            placement.large()
        else:
            speed.speed()


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_list("sections", list(DEFAULT), f"What to measure, of {', '.join(SECTIONS)}.")
    flags.DEFINE_integer("repeats", 15, "Steps per figure of section executor; the median counts.", lower_bound=1)
    flags.DEFINE_integer("seeds", 10, "Random clusters of section placement.", lower_bound=1)
    flags.DEFINE_string("cluster", "configs/clusters/a100_16x8_measured.json", "The cluster of section placement.")
    flags.DEFINE_integer("worker", None, "For the benchmark's own processes.")
    flags.DEFINE_string("coordinator", None, "For the benchmark's own processes.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
