"""Profiles of training steps: traces, and the parts into which they divide a step's seconds.

May import `paxtrain.config`, `process`, `run` and `xla`.
"""
