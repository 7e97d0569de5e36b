"""Emulated hosts on this machine (root).

hosts.py           a cluster of hosts as network namespaces
network.py         rated links and uplinks
quota.py           shares of a core
janitor.py         the process that takes a cluster down
scenario.py        which links are how fast, from scenarios/*.json
slurm_cluster.py   SLURM on these hosts
"""
