"""The pipeline: the executor that runs a schedule's table stage by stage inside shard_map.

    executor.py          rows of a table, in order; sends gradients that are not compressed
    stage.py             F, B and W of one micro-batch on one device
    closing.py           a stage's last op, with the reduction of its gradients over data inside
    one_stage.py         the same without rows, for a single stage
    program.py           static facts of the pipeline, a stage's weights, a layer's place
    sharding.py          weights and sums of gradients in shards over data: when they are gathered and scattered
    messages.py          what goes from row to row; sends all activations, and the gradients that are compressed
    split_backward.py    the backward in two, B and W
    residuals.py         what a forward keeps for its backward, and the backward, whose products add to accumulators
    rings.py             slots of rings, accumulators, work that may be skipped
    collectives.py       permutes and gathers, on a real mesh and on the virtual one
    virtual.py           the same program on one device, by vmap

A gradient over data becomes a message in `paxtrain/parallel/gradients.py`.
"""
