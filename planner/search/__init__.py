"""The search: candidates, lower bounds that prune them, memory limits, and the ranking of what is left.

    search.py                    bound, simulate, rank, place
    space.py budget.py           all candidates; those that fit into memory
    pruning.py                   lower bounds in closed form
    layers.py                    layers per stage
    baselines.py explain.py      gains over others' rules; reasons against the neighbors of the chosen plan

May import `cluster`, `cost`, `memory` and `placement`.
"""
