"""Answers that take more than one plan.

memory.py         does it fit, what takes how much, on how few devices, what to change
free_choice.py    what parts of a plan cost that flags fix
hosts.py          what more hosts bring
what_if.py        plans for a cluster that changes
"""
