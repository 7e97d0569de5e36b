"""Console scripts: `paxplan COMMAND ...` is `python -m planner.COMMAND ...`."""

from paxtrain.cli import Command, run_command

COMMANDS: dict[str, Command] = {
    "plan": ("planner.plan", (), "choose the plan for a model on a cluster"),
    "memory": ("planner.memory", (), "answer whether a model fits a cluster, and what takes how much"),
    "export": ("planner.export", (), "write a plan for Megatron-LM, torchtitan or MaxText"),
    "profile": ("planner.profile", (), "measure the cluster that it runs on"),
    "cluster_of": ("planner.cluster_of", (), "make a cluster's file of logs, topologies and traces"),
    "launch": ("planner.launch", (), "write a job for SLURM or Kubernetes, or run one on this machine"),
    "run": ("planner.run", (), "plan for the nodes of a job, and train on them"),
    "validate": ("planner.validate", (), "score predictions against measured runs"),
    "calibrate": ("planner.calibrate", (), "propose the few runs that teach most about a cluster"),
    "convert": ("planner.convert", (), "convert published trials for validate"),
}


def main() -> None:
    """Run the command that the arguments of `paxplan` name."""
    run_command("paxplan", COMMANDS)
