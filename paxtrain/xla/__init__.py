"""Compiled programs: facts read from their text, and compiling for GPUs that the machine does not have.

    module.py    a program's text, parsed
    hlo.py       facts read from it: collectives, what lies under them, loops, copies
    costs.py     the bytes and FLOPs of its kernels
    aot.py       programs compiled for GPUs that are not there

May import `paxtrain.devices`.
"""
