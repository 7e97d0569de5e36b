"""The compiled programs of a study: what variants share is compiled once, by the first thread that needs it."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax

from paxtrain.config.options import NO_OPTIONS
from paxtrain.parallel.compression.ranks import Ranks
from paxtrain.parallel.compression.settled import CodecStates
from paxtrain.parallel.step import Trainer, TrainState

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

TrainStep = Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


def once(make: Callable[[_K], _V]) -> Callable[[_K], _V]:
    """Return a function that makes the value of each argument once, however many threads ask; they wait for the first.

    Args:
        make: argument -> value.
    """
    lock = threading.Lock()
    found: dict[_K, concurrent.futures.Future[_V]] = {}

    def get(key: _K) -> _V:
        with lock:
            first = key not in found
            future = found.setdefault(key, concurrent.futures.Future())
        if first:
            try:
                future.set_result(make(key))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    return get


def at_ranks(trainer: Trainer, ranks: Ranks) -> Trainer:
    """Return the trainer of a step with some ranks over data.

    If no stage compresses, it is the trainer of a run without compression over data, so that a run which begins dense
    shares this program with one that stays dense. Only the state differs: it lacks "data" of the codecs.

    Args:
        trainer: trainer of the run.
        ranks: rank of each stage, 0 for dense.
    """
    if any(ranks):
        return dataclasses.replace(trainer, stage_ranks=ranks)
    off = {"stages": "none", "codec": "", "options": NO_OPTIONS, "inside": 1}
    config = dataclasses.replace(trainer.config, compress=trainer.config.compress.changed(data=off))
    return dataclasses.replace(trainer, config=config, stage_ranks=None)


def first_codec(trainer: Trainer) -> Callable[[], CodecStates]:
    """Return the compiled first state of a run's compression; the rest of a first state is that of any run.

    Args:
        trainer: trainer of the run.
    """
    return jax.jit(trainer.compression.init, out_shardings=trainer.state_shardings.codec).lower().compile()


def on_dense(step: TrainStep) -> TrainStep:
    """Return a step of a run without compression over data as a step of a run that has its state already."""

    def run(state: TrainState, batch: jax.Array) -> tuple[TrainState, dict[str, Any]]:
        data = state.codec["data"]
        state, values = step(dataclasses.replace(state, codec=state.codec | {"data": ()}), batch)
        return dataclasses.replace(state, codec=state.codec | {"data": data}), values

    return run
