"""The configuration of a run: frozen dataclasses that validate themselves, and plans that override parts of them.

May import `paxtrain.schedule`, and `paxtrain.errors` as everything may.
"""

from paxtrain.config.compress import CompressConfig
from paxtrain.config.config import (
    SAVE_MODES,
    SPLIT_SAVES,
    BatchConfig,
    CheckpointConfig,
    Config,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    RunConfig,
    from_dict,
    read_section,
    scans,
    to_dict,
)
from paxtrain.config.data import DataConfig
from paxtrain.config.model import ModelConfig

__all__ = [
    "SAVE_MODES",
    "SPLIT_SAVES",
    "BatchConfig",
    "CheckpointConfig",
    "CompressConfig",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RunConfig",
    "from_dict",
    "read_section",
    "scans",
    "to_dict",
]
