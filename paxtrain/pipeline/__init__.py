"""The pipeline: schedules as tables, and the executor that runs them stage by stage inside shard_map.

May import `compress`, `paxtrain.config` and `paxtrain.model`.
"""
