"""Flags shared by the mains that measure a cluster."""

import os

from absl import flags


def define_flags() -> None:
    """Define --compute_hosts, --peak, --rack and --site."""
    flags.DEFINE_integer(
        "compute_hosts", 0, "Hosts of each device kind whose compute is measured; 0: all.", lower_bound=0
    )
    flags.DEFINE_float("peak", 0, "Dense bfloat16 FLOP/s of this host's GPUs, if paxtrain/devices/gpus.py lacks them.")
    wrong = "it must be in FLOP/s: 125 TFLOP/s are 1.25e14"
    flags.register_validator("peak", lambda peak: peak == 0 or 1e10 <= peak <= 1e17, wrong)
    rack = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    flags.DEFINE_string("rack", rack, "Name of this host's rack; default: the one that SLURM gives.")
    site = os.environ.get("PAXTRAIN_SITE", "")
    flags.DEFINE_string("site", site, "Name of this host's site; default: the environment's PAXTRAIN_SITE.")
