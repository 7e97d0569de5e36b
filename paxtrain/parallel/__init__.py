"""The parallel training step: mesh, layout of the parameters, gradients over data, compression, optimizer.

May import `compress` and the rooms below it: `config`, `model`, `pipeline`, `process`.
"""
