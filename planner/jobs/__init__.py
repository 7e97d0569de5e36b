"""Jobs: batch scripts for SLURM, manifests for Kubernetes, processes on this machine.

`launching` checks the options of planner.launch. May import `memory` and `supervision`.
"""
