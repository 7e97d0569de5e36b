"""Jobs: batch scripts for SLURM, manifests for Kubernetes, processes on this machine.

    launching.py job.py               options and their checks; what runs on each node
    slurm.py jobset.py local.py       the job for SLURM, for Kubernetes, on this machine

`launching` checks the options of planner.launch.
"""
