"""paxtrain: language models trained over a (data, pipe, context, tensor) mesh. It imports compress, never planner.

From the outside in: run/ has the loop around a step, outer/ steps of groups that train apart, parallel/ the step,
pipeline/ what a stage does in it and schedule/ in which order, model/ and architectures/ a layer. data/ and config/
are what goes in, profiling/, xla/ and study/ tell what came of it, process/ is this process among others, and
devices/ the data sheets.

Programs lie directly in this package (`python -m paxtrain.train`) or are a subpackage's own (huggingface, study,
testing). Beside them are what all programs start with (cli.py, command_line.py, flags.py) and what every subpackage may
import (errors.py, files.py, knobs.py, tables.py). The names below are the interface for programs that import paxtrain.
Each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paxtrain.config import (
        BatchConfig,
        CheckpointConfig,
        CompressConfig,
        Config,
        DataConfig,
        MeshConfig,
        ModelConfig,
        OptimizerConfig,
        PipelineConfig,
        RunConfig,
    )
    from paxtrain.config.load import load_config
    from paxtrain.config.plan import Plan
    from paxtrain.errors import UserError
    from paxtrain.parallel.mesh import make_mesh
    from paxtrain.parallel.step import Trainer, TrainState
    from paxtrain.process.distributed import initialize as join
    from paxtrain.run.run import TrainingResult
    from paxtrain.run.sampling import sample
    from paxtrain.run.training import train
    from paxtrain.schedule.drawing import draw_schedule
    from paxtrain.schedule.schedules import build as schedule_table

# Module and attribute of each public name.
_EXPORTS = {
    "BatchConfig": "paxtrain.config:BatchConfig",
    "CheckpointConfig": "paxtrain.config:CheckpointConfig",
    "CompressConfig": "paxtrain.config:CompressConfig",
    "Config": "paxtrain.config:Config",
    "DataConfig": "paxtrain.config:DataConfig",
    "MeshConfig": "paxtrain.config:MeshConfig",
    "ModelConfig": "paxtrain.config:ModelConfig",
    "OptimizerConfig": "paxtrain.config:OptimizerConfig",
    "PipelineConfig": "paxtrain.config:PipelineConfig",
    "Plan": "paxtrain.config.plan:Plan",
    "RunConfig": "paxtrain.config:RunConfig",
    "TrainState": "paxtrain.parallel.step:TrainState",
    "Trainer": "paxtrain.parallel.step:Trainer",
    "TrainingResult": "paxtrain.run.run:TrainingResult",
    "UserError": "paxtrain.errors:UserError",
    "draw_schedule": "paxtrain.schedule.drawing:draw_schedule",
    "join": "paxtrain.process.distributed:initialize",
    "load_config": "paxtrain.config.load:load_config",
    "make_mesh": "paxtrain.parallel.mesh:make_mesh",
    "sample": "paxtrain.run.sampling:sample",
    "schedule_table": "paxtrain.schedule.schedules:build",
    "train": "paxtrain.run.training:train",
}
__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "CompressConfig",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "Plan",
    "RunConfig",
    "TrainState",
    "Trainer",
    "TrainingResult",
    "UserError",
    "draw_schedule",
    "join",
    "load_config",
    "make_mesh",
    "sample",
    "schedule_table",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
