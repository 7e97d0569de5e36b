"""Benchmarks of the planner.

May import every other room.
"""
