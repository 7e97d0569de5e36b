"""The model: GPT-2 and Llama as pure functions, and tensor parallelism inside them.

transformer.py        the models, for one device and for many; names of the activations that may be saved
tensor_parallel.py    the collectives of a layer and the embedding over tensor
pointwise.py          norms and activations, which keep little for their backward
cross_entropy.py      the head's loss and its gradients, without the logits of all tokens
"""
