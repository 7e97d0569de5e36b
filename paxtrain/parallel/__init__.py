"""The parallel training step: mesh, layout of the parameters, gradients over data, compression, optimizer.

step.py                      Trainer: the compiled functions of one configuration on one mesh; clipping
mesh.py layout.py            devices by axes (a new axis begins in config/axes.py); how parameters lie on them
weights.py                   the weights' gather over data, before the pipeline
reduction.py                 when a stage reduces which of its gradients over data
gradients.py                 the collectives that do it, and the exchange of the tied embedding's gradients
compression/                 codecs of the links and of the embedding, reducer, ranks, their checks
compressed_stages.py         the stages to compress, from measured times
optimizer.py muon.py         the update; learning rates
compiler_options.py          XLA's options for the step
"""
