"""One device's attention is in model/attention.py; here is attention over a sequence that a mesh axis splits.

Functions of arrays, which know nothing of models.

blocks.py    attention of a block of queries to a block of keys, forward with its log-sum-exp, and backward
flash.py     the same by cuDNN's kernel
split.py     the order of a split sequence; a ring of blocks, keys gathered once, heads in exchange for tokens
"""
