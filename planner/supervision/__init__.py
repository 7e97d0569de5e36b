"""Supervision: watching the processes of a run, and naming the first cause when it fails.

May import nothing else of the planner.
"""
