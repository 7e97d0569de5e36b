"""The pipeline: the executor that runs a schedule's table stage by stage inside shard_map.

May import `compress` and the rooms `config`, `model` and `schedule`.
"""
