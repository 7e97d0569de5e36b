"""Placement: which tensor group lies on which host.

May import `planner.cluster` and `planner.cost`.
"""
