"""Bytes of a training step on one device: in closed form, and from the compiler.

May import nothing else of the planner.
"""
