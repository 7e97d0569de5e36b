"""Measurement of a cluster by its own processes: its hosts, links and compute.

May import `cluster` and `cost`.
"""
