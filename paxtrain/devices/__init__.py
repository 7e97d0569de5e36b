"""Device kinds: what data sheets and drivers say of them. This package imports nothing of the project.

    datasheets.py   peak rates of all known devices: model FLOPs utilisation (MFU), fits of job logs
    gpus.py         GPUs for which programs can be compiled and plans made without having one

A new GPU needs a line in datasheets.py. If the planner is to plan for it, it also needs an entry in gpus.py, whose
peak rates the line then reads. Nothing else in the project names GPU models, except the sizes for which the kernels of
compress/triton.py are laid out.
"""
