"""Programs: facts read from a compiled one's text or a traced one's jaxpr, and compiling for GPUs that are not there.

module.py    a program's text, parsed
hlo.py       facts read from it: collectives, what lies under them, loops
costs.py     the bytes and FLOPs of its kernels
traced.py    the collectives of a program that is traced, and not compiled
aot.py       programs compiled for GPUs that are not there
"""
