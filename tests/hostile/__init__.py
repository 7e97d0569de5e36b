"""Hostile input to the mains, which Hypothesis generates and shrinks; `python -m tests.hostile` runs it."""
