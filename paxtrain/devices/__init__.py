"""Device kinds, as data sheets and drivers describe them. This package imports nothing of the project.

    gpus.py         the record of each GPU, with its names in drivers and logs
    host.py         memory of this machine, which virtual CPU devices share
    datasheets.py   peak rates of these and of older devices: model FLOPs utilisation (MFU), fits of job logs

Plans for a new GPU need no code: a cluster's file can describe its devices (planner/cluster/cluster_file.py), and
planner.profile and planner.run measure it with --peak. To plan for it by its name, it needs a record in gpus.py.

What needs more than figures is where it is used: which kernels of compression a GPU runs, and up to which rank, is in
compress/kernels.py; from which capability on cuDNN has flash attention, in paxtrain/config/model.py. Blocks of
compress/gpu/passes.py are laid out for an H100 or H200.
"""
