"""The way from a cluster and a configuration to a plan: the search, the compiler's check, the report.

May import `report` and everything that `report` may import.
"""
