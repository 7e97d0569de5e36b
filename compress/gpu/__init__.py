"""Kernels for NVIDIA GPUs.

    triton.py       passes over whole matrices, for Pallas's Triton backend
    mosaic.py       the same for Pallas's Mosaic GPU backend, on Hopper
    thin.py         the algebra between the passes, on thin factors, for the Triton backend
    tiles.py        what they share: tiles with masked edges, products of tiles, launches, the split of sums

compress/kernels.py and compress/subspace.py are the way to them. This room may import nothing of this project.
"""
