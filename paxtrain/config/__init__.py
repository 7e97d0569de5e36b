"""The configuration of a run: frozen dataclasses that validate themselves, and plans that override parts of them.

axes.py                                      the axes of the mesh
config.py                                    all sections together, and the checks that involve several of them
model.py parallel.py optimizer.py            the sections: model; mesh, pipeline and batch; optimizers
data.py compress.py run.py                   data; compression; run and checkpoints
options.py                                   options of codecs, and the places that have codecs
load.py                                      configurations from mappings and files
plan.py                                      a plan, which sets mesh, pipeline, batch, compression and groups
checks.py                                    helpers of the sections' `check`; settings that would fit instead
"""

from paxtrain.config.compress import CompressConfig
from paxtrain.config.config import Config
from paxtrain.config.data import DataConfig
from paxtrain.config.load import from_dict, read_section, to_dict
from paxtrain.config.model import ModelConfig
from paxtrain.config.optimizer import OptimizerConfig, OuterConfig
from paxtrain.config.parallel import (
    CONTEXT_FORMS,
    REDUCE_DTYPES,
    SAVE_MODES,
    SHARDS,
    SPLIT_SAVES,
    BatchConfig,
    MeshConfig,
    PipelineConfig,
    scans,
)
from paxtrain.config.run import CheckpointConfig, RunConfig

__all__ = [
    "CONTEXT_FORMS",
    "REDUCE_DTYPES",
    "SAVE_MODES",
    "SHARDS",
    "SPLIT_SAVES",
    "BatchConfig",
    "CheckpointConfig",
    "CompressConfig",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OuterConfig",
    "PipelineConfig",
    "RunConfig",
    "from_dict",
    "read_section",
    "scans",
    "to_dict",
]
