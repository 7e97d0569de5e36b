"""Placement: the host of each tensor group.

May import `planner.cluster` and `planner.cost`.
"""
