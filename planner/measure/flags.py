"""Flags shared by the mains that measure a cluster."""

import os

from absl import flags


def define_flags() -> None:
    """Define --compute_hosts, --rack and --site."""
    flags.DEFINE_integer(
        "compute_hosts", 0, "Hosts of each device kind whose compute is measured; 0: all.", lower_bound=0
    )
    rack = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    flags.DEFINE_string("rack", rack, "Name of this host's rack; default: the one that SLURM gives.")
    site = os.environ.get("PAXTRAIN_SITE", "")
    flags.DEFINE_string("site", site, "Name of this host's site; default: the environment's PAXTRAIN_SITE.")
