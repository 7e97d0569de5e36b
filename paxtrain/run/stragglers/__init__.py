"""Hosts, devices and links that make a run's steps slower, found while it runs.

stragglers.py     Stragglers, which the loop calls: it notices, looks and tells
step_change.py    a lasting change of the seconds of a step
suspects.py       what may become slow: CPUs, devices, links, input; the links that a mesh uses
probe.py          seconds of small pieces of work on all of them
judgement.py      the parts that explain slower steps
"""
