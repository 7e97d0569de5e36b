"""Propose the few runs that teach most about a cluster: python -m planner.calibrate --model=gpt_8b --cluster=a100_16x8.

Somebody who trains with another trainer knows neither what its host costs nor what the links bring through. A wrong
choice of the layout is the price of that. This main says how large it is expected to be, and which runs, on at most a
quarter of the hosts, lower it most (planner/fit/design.py). It writes them to OUT/trials.csv, a table as
planner/runs/trials.py describes it, whose `seconds` you fill in: a minute of training each is enough. Beside it is
expected_loss.png, the loss that is expected after each of them. Given the table by --trials, it proposes the next runs,
until more would not pay. Then planner.validate and planner.plan --constants take it from there.
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import run
from paxtrain.config import from_dict
from paxtrain.config.parallel import MOST_SEQUENCES
from paxtrain.errors import UserError
from paxtrain.flags import define_config
from planner.cluster import cluster as clusters
from planner.fit import accuracy
from planner.fit.proposals import proposals
from planner.runs import published, trials
from planner.runs.trainers import TRAINERS

HINT = "overrides are written --model.section.key=value"


def main(argv: Sequence[str]) -> None:
    """Propose, and write the table."""
    f = flags.FLAGS
    if not f.cluster:
        raise UserError("--cluster is missing; name a file such as configs/clusters/a100_16x8.json")
    cluster = clusters.Cluster.load(f.cluster)
    if "cpu" in cluster.kinds:
        raise UserError("--cluster has CPUs, for which no other trainer is known; name a cluster of GPUs")
    config = from_dict(f.model.to_dict())
    batch = f.global_batch or config.batch.global_batch
    measured = published.read(f.trials) if f.trials else []
    lines, runs, regrets = proposals(cluster, config.model, f.trainer, batch, measured, f.runs)
    print("\n".join(lines))
    if runs:
        out = pathlib.Path(f.out) / "trials.csv"
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            accuracy.plot_regrets(out.parent / "expected_loss.png", regrets)
            trials.write(
                out, [{name: trial.columns.get(name, "") for name in trials.COLUMNS} for trial in [*measured, *runs]]
            )
        except OSError as error:
            raise UserError(f"cannot write {out} ({error.strerror}); name a folder by --out") from error
        print(f"fill in the seconds of {out}, and go on with --trials={out}")


def define_flags() -> None:
    """Define this main's flags."""
    define_config("model", "gpt_8b", "The configuration whose model is trained.")
    flags.DEFINE_string("cluster", None, "The cluster: a file, or the name of one in configs/clusters.")
    flags.DEFINE_enum("trainer", "megatron-lm", [name for name in TRAINERS if name], "Who runs it.")
    flags.DEFINE_string("trials", None, "Runs so far: a table as planner/runs/trials.py describes it.")
    flags.DEFINE_integer("runs", 6, "Runs to propose at most.", 1, 100)
    flags.DEFINE_integer("global_batch", 0, "Sequences per step; 0: as configured.", 0, MOST_SEQUENCES)
    flags.DEFINE_string("out", "runs/calibrate", "The folder to write to.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
