"""Temporary bytes of the training step by schedule, save mode and number of micro-batches."""

from experiments.bench.trainer.steps import configuration
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.tables import size


def memory() -> None:
    """Print the temporary bytes of the step on a (1, 4, 2) mesh of virtual devices."""
    print("\ntemporary bytes per device, pipe=4, tensor=2, 8 layers of 256, float32 (CPU buffer assignment)")
    print(f"  {'schedule':<18}{'save':<14}{'m=8':>10}{'m=32':>10}{'ratio':>8}")
    rows = [(schedule, "dots") for schedule in ("eager_1f1b", "1f1b", "interleaved_1f1b", "gpipe", "zb_h1")]
    rows += [("eager_1f1b", save) for save in ("layer_inputs", "residuals", "inputs")]
    for schedule, save in rows:
        chunks = 2 if schedule == "interleaved_1f1b" else 1

        def temporary(m: int, schedule: str = schedule, save: str = save, chunks: int = chunks) -> int:
            c = configuration((1, 4, 2), m, schedule=schedule, save=save, virtual_stages=chunks)
            analysis = Trainer(c, make_mesh(c.mesh)).compile_step().memory_analysis()
            assert analysis is not None
            return analysis.temp_size_in_bytes

        few, many = temporary(8), temporary(32)
        print(
            f"  {schedule:<18}{save:<14}{size(few, 'B'):>10}{size(many, 'B'):>10}{many / few:>8.3f}",
            flush=True,
        )
