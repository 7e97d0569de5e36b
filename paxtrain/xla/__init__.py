"""Compiled programs: facts read from their text, and compiling for GPUs that are not there.

May import `paxtrain.devices`.
"""
