"""Compiled programs: facts read from their text, and compiling for GPUs that the machine does not have.

    hlo.py    facts read from a compiled program's text
    aot.py    programs compiled for GPUs that are not there

May import `paxtrain.devices`.
"""
