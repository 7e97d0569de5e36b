"""Files that people have instead of a profile, read into a cluster's file and rows of its compute.

units.py            rates in gigabytes and gigabits a second
nccl_tests.py       logs of nccl-tests
links.py            latencies and bandwidths from them
host_topology.py    devices, NVLinks and NICs of a host
topo_matrix.py      ... from `nvidia-smi topo -m`
nccl_xml.py         ... from NCCL's topology
slurm_topology.py   leaf switches and blocks of hosts
hardware.py         hosts, devices and NICs, from all of them
joining.py          all of it as a cluster's file
"""
