"""The search: candidates, lower bounds that prune them, memory limits, and the ranking of what is left.

May import `cluster`, `cost`, `memory` and `placement`.
"""
