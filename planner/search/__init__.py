"""The search: candidates, lower bounds that prune them, memory limits, and the ranking of what is left.

search.py                    bound, simulate, rank, place
space.py enumeration.py      candidates as columns; all that the trainer accepts
budget.py                    those that fit into memory
pruning.py                   lower bounds in closed form
tried.py pool.py             candidates on known placements; the placements of each mesh
splitting.py                 layers per stage
refine.py                    plan, placement and layers chosen together
nearby.py                    quicker plans on fewer hosts, and for batches near by
baselines.py explain.py      gains over others' rules; reasons against the neighbors of the chosen plan, and for
                             a plan that compresses nothing
"""
