"""The model: GPT-2 and Llama as pure functions, and tensor parallelism inside them.

May import `compress` and `paxtrain.config`.
"""
