"""Benchmarks of the training step: `python -m experiments.bench.trainer`.

memory.py throughput.py bubble.py   sections of the benchmark
passes.py                           another one, the memory passes of codecs
steps.py                            the steps that are timed, and the timing
two_processes.py                    two processes with a core each, for the bubble and for the planner's benchmark
"""
