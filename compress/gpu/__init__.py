"""Kernels for NVIDIA GPUs, for Pallas's Triton backend.

    passes.py       passes over whole matrices
    thin.py         the algebra between the passes, on thin factors
    cholesky.py     inverses of Cholesky factors, within a program
    sums.py         sums of what the programs of an earlier launch have left
    tiles.py        what they share: operands, tiles with masked edges, products, launches, the split of sums

compress/kernels.py and compress/subspace.py are the way to them. This room may import nothing of this project.
"""
