"""Benchmarks of the planner.

executor.py     the simulator beside the executor
placement.py    the quality of placements
speed.py        the time and memory of dry runs
"""
