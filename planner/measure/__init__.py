"""A cluster measured by its own processes: its hosts, links and compute.

May import `cluster` and `cost`.
"""
