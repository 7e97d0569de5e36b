"""Training data: corpora of text, tokenizers, token files made from them, data sets and mixtures of those.

May import `paxtrain.config`.
"""
