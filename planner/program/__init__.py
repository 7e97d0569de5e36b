"""The work of a layer, read from its own program: its products, collectives and passes, and the bytes that F keeps.

layer_program.py    the record
cache.py            the programs by model and sizes, kept on disk; imports no jax unless one has to be read
reading.py          reads one from the traced functions of the model, without devices
kinds.py            the room for layers of several kinds on a stage
operations.py       a trace's operations, and what its primitives are
traffic.py          the bytes that its passes over memory move
"""
