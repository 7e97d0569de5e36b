"""Device kinds, as data sheets and drivers describe them. This package imports nothing of the project.

    datasheets.py   peak rates of all known devices: model FLOPs utilisation (MFU), fits of job logs
    gpus.py         GPUs for which programs are compiled and plans are made on machines without them

Plans for a new GPU need no code: a cluster's file can describe its devices (planner/cluster/cluster_file.py). Its model
FLOPs utilisation needs a line in datasheets.py. To measure it and to compile for it, gpus.py needs an entry, from which
that line takes its rates. planner/cluster/device_sheets.py has the share of the peak that products reach, by compute
capability.

The capability also chooses kernels: those of compression in compress/kernels.py (`on_gpu`), with the ranks they take in
paxtrain/parallel/compression/named.py, whose error names the GPUs as paxtrain/config/compress.py does; flash attention
in paxtrain/config/model.py. Blocks of compress/gpu/triton.py and wgmma.py are laid out for an H100 or H200, those of
tcgen05.py for a B200.
"""
