"""The start of a job: who has come, what nodes it got, and the plan for them.

May import `measure` and `planning`.
"""
