"""Placement: the host of each tensor group.

place.py              the entrance: host order, exact search, annealing, a climb
exact.py anneal.py    all placements, if there are few; simulated annealing over the others
climb.py              exchanges of hosts, racks and groups, until none makes a placement better
surrogate.py          quick times of pipelines, for placements that are only looked at
bounds.py least.py    a lower bound over all placements; the least that their messages and collectives take
gain.py               the gain of one placement over another
spared.py             links on which a plan that has its placement need not compress
host_rings.py         hosts that devices which share sequences lie on together
rules.py              the rules of AMP and Pipette, to compare with
"""
