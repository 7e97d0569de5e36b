"""Seconds of a training step: compute, transfers and reductions, joined by a simulation of the executor.

May import `planner.cluster`.
"""
