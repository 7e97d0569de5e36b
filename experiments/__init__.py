"""Experiments: what draws the docs' figures. No part of the installed package; nothing in it imports this folder.

hosts/        emulated hosts: network namespaces, rated links, shares of a core, a SLURM cluster
lab/          measurements on emulated hosts, and the page made of them: `make lab`
gpu/          measurements on GPUs: `make gpu`
bench/        benchmarks of the training step, the planner and the kernels: `make bench`
memory/       what the compiler takes for small models, beside the closed form
published/    steps that others published, beside predictions
propagation.py    training with lazy error propagation and without
environment.py    environments of scripts that bring their own dependencies
"""
