"""Hostile input to the mains, as numbered cases; `python -m tests.hostile` runs them."""
