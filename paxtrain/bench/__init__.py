"""Benchmarks of the training step: `python -m paxtrain.bench`.

    memory.py throughput.py bubble.py ledger.py   sections of the benchmark
    passes.py                                     another one, the memory passes of codecs
    steps.py                                      the steps that are timed, and the timing
    two_processes.py                              two processes with a core each, for the bubble and for planner.bench

May import every other room of `paxtrain`.
"""
