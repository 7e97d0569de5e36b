"""The compression of one configuration on one mesh.

settled.py      Compression: codecs of the links, the reducer, levels of the stages, and their state
named.py        the codecs that a configuration names; the implementation of their kernels
embedding.py    the codec of the embedding's gradients
ranks.py        ranks of the stages over data, from step to step
checks.py       what is refused before anything is compiled
"""
