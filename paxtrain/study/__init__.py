"""The compression study: the same model trained with different compression, and a page about it.

May import every other room of `paxtrain`.
"""
