"""Seconds of a training step: compute, transfers and reductions, joined by a simulation of the executor.

candidate.py            a plan without its placement
sizes.py                what a candidate keeps on a device and sends, in bytes and parameters
link_seconds.py         bandwidths to seconds per byte, for messages and rings of a placement
compute.py              a layer on a device kind; the seconds of its all-reduces over tensor
data_axis.py            the gather of the weights and the reduction of the gradients over data
step_time.py            the whole step: bytes times seconds per byte, and the pipeline's simulation
shares.py               micro-batches of data ranks by the speed of their devices
terms.py                a step's terms by stage, to be compared with a run's breakdown
coded.py                what codecs other than low rank declare
outer.py                the exchange of groups that train apart
simulate.py             one configuration on one cluster
closed_forms.py         rings, and kernels that wait; Pipette's and AMP's steps, for comparison only
"""
