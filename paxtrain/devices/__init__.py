"""Device kinds, as data sheets and drivers describe them. This package imports nothing of the project.

    datasheets.py   peak rates of all known devices: model FLOPs utilisation (MFU), fits of job logs
    gpus.py         GPUs for which programs are compiled and plans are made on machines without them

A new GPU needs a line in datasheets.py. A GPU that the planner plans for also needs an entry in gpus.py, from which the
line takes its peak rates. Its links are measured, or go into a file of configs/clusters. The compute capability also
chooses kernels, in paxtrain/parallel/compression.py (whose error names the GPUs, as paxtrain/config/compress.py does)
and paxtrain/config/model.py. The block sizes of compress/triton.py
are laid out for an H100 or H200.
"""
