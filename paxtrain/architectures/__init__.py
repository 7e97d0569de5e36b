"""Architectures, one a file, whose name is the family (--config.model.family=llama).

Only defaults, planner/export, planner/memory/margin.py and tables of runs name one; a new family needs none of them.
"""
