"""The parallel training step: the mesh, the layout of parameters on it, gradients over data, the optimizer.

May import `compress` and the rooms below it: `config`, `model`, `pipeline`, `process`.
"""
