"""The model: GPT-2 and Llama as pure functions, and tensor parallelism inside them.

    transformer.py        the models, for one device and for many; names of the activations that may be saved
    tensor_parallel.py    the collectives of a layer, the embedding and the head over tensor

May import `compress` and `paxtrain.config`.
"""
