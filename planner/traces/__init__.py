"""Compute from a trace of one GPU, for those who cannot measure layers by themselves.

kernels.py       kernels with their parts of a step, and the seconds of a layer
phases.py        F, B and the optimizer of kernels that a host launched, by the operators around the launches
torch_trace.py   traces of torch.profiler
xla_trace.py     traces of jax.profiler
nsys.py          exports of Nsight Systems
compute_row.py   a row of a cluster's compute
"""
