"""Profiles of training steps: traces, and the breakdown of a step's seconds into parts.

May import `paxtrain.config`, `process`, `run` and `xla`.
"""
