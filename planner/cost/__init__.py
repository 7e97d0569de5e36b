"""Seconds of a training step: compute, transfers and reductions, joined by a simulation of the executor.

    link_seconds.py         bandwidths to seconds per byte, for messages and rings of a placement
    compute.py              a layer on a device kind; the seconds of its all-reduces over tensor
    step_time.py            bytes times seconds per byte: messages, reductions, and the whole step
    terms.py                a step's terms by stage, to be compared with a run's breakdown
    coded.py                what codecs other than low rank declare
    outer.py                the exchange of groups that train apart
    rows.py simulator.py    the pipeline: a schedule's table, and its replay
    repetition.py           rows that repeat many times, of which few are replayed
    simulate.py             one configuration on one cluster
    ideal.py                what a schedule would allow, for comparison
    closed_forms.py         Pipette's and AMP's estimates, for comparison

May import `planner.cluster`, and `compress` within functions: it imports jax.
"""
