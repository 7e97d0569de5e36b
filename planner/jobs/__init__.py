"""Jobs: batch scripts for SLURM, manifests for Kubernetes, processes on this machine.

May import `memory` and `supervision`.
"""
