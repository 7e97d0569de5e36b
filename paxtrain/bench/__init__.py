"""Benchmarks of the training step.

May import every other room of `paxtrain`.
"""
