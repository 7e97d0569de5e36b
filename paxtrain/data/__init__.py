"""Training data: tokenizers, token files, data sets and mixtures of them.

May import `paxtrain.config`.
"""
