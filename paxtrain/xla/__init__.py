"""Compiled programs: facts read from their text, and compiling for GPUs that the machine does not have.

May import `paxtrain.devices`.
"""
