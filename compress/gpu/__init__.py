"""Kernels for NVIDIA GPUs, reached through compress/kernels.py. Nothing of this project is imported from outside.

triton.py       passes over whole matrices, for Pallas's Triton backend
thin.py         the algebra between the passes, on thin factors, for the Triton backend
tiles.py        what triton.py and thin.py share: tiles with masked edges, products of tiles, launches
"""
