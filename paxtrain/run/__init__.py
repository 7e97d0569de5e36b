"""The training run: its loop, checkpoints, metrics, tables and figures, and text sampled from its checkpoints.

May import the rooms of the step (`config`, `model`, `pipeline`, `schedule`, `parallel`), `data`, `process`,
`profiling`, `devices` and `xla`.
"""
