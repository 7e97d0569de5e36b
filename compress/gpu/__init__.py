"""Kernels for NVIDIA GPUs, reached through compress/kernels.py and subspace.py. They import nothing of this project.

    triton.py       passes over whole matrices, for Pallas's Triton backend
    mosaic.py       the same for Pallas's Mosaic GPU backend, on Hopper
    thin.py         the algebra between the passes, on thin factors, for the Triton backend
    tiles.py        what they share: tiles with masked edges, products of tiles, launches, the split of sums
"""
