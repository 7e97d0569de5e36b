"""Measuring a cluster: links and compute, by the processes that run on it.

May import `cluster` and `cost`.
"""
