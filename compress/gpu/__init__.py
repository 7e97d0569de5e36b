"""Kernels for NVIDIA GPUs.

    triton.py           passes over whole matrices, for Pallas's Triton backend
    mosaic.py           the same for Pallas's Mosaic GPU backend, by one of the two that follow
    mosaic_wgmma.py     its kernels for Hopper's matrix units, the implementation "wgmma"
    mosaic_tcgen05.py   its kernels for Blackwell's, the implementation "tcgen05"
    tma.py              the tiles that they take
    cholesky.py         inverses of Cholesky factors, within a program
    sums.py             sums of what the programs of an earlier launch have left
    thin.py             the algebra between the passes, on thin factors, for the Triton backend
    tiles.py            what they share: operands, tiles with masked edges, products, launches, the split of sums

compress/kernels.py and compress/subspace.py are the way to them. This room may import nothing of this project.
"""
