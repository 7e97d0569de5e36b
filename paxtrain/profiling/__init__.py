"""Profiles of training steps: traces, and the breakdown of a step's seconds into parts.

profiler.py      the profile of some steps of a run
trace.py         the reader of traces
breakdown.py     a step's seconds, shared out to parts
terms.py         predicted beside measured terms of a step
ledger.py        what a compiled step computes, moves and sends on a GPU that is not there
timeline.py      timelines for Perfetto and as a picture
canvas.py        an empty figure and the style of all figures, also those of runs and of the study
"""
