"""The optimizer of a configuration: optax's AdamW with a decay mask, Muon, SGD, and the learning-rate schedules."""

import functools

import jax
import optax

from paxtrain.config import Config, ModelConfig, OptimizerConfig
from paxtrain.model import parameters
from paxtrain.parallel.layout import Params, names
from paxtrain.parallel.muon import Route, is_matrix, muon


def learning_rate(opt: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate of an update, as a function of the number of updates before it.

    The first update has the rate learning_rate / warmup_steps, not zero. The last update has the schedule's final rate.

    Args:
        opt: Optimizer, whose schedule counts.
        steps: Steps of the run.
    """
    peak, final = opt.learning_rate, opt.learning_rate * opt.final_fraction
    warmup = optax.linear_schedule(0.0, peak, opt.warmup_steps)
    if opt.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(1, steps - opt.warmup_steps), alpha=opt.final_fraction)
    elif opt.schedule == "wsd":
        stable = steps - opt.warmup_steps - opt.decay_steps
        decay = optax.linear_schedule(peak, final, opt.decay_steps)
        after = optax.join_schedules([optax.constant_schedule(peak), decay], [stable])
    else:
        after = optax.constant_schedule(peak)
    schedule = optax.join_schedules([warmup, after], [opt.warmup_steps]) if opt.warmup_steps else after
    return lambda count: schedule(count + 1)


def decay_mask(config: ModelConfig, params: Params) -> Params:
    """Return True for each parameter with weight decay: matrices and embeddings, not biases and norms."""
    known = parameters.by_names(config)
    return jax.tree_util.tree_map_with_path(lambda path, _: known[names(path)].decays, params)


def make_optimizer(config: Config, route: Route = ()) -> optax.GradientTransformation:
    """Return AdamW, SGD, or Muon for the layers' matrices with AdamW for all other parameters.

    Clipping is not included, because the global norm must count the tied embedding once (see step.py).

    Args:
        config: Configuration of the run; its optimizer and its number of steps count.
        route: Shardings through which Muon's updates pass (see muon.py); () on one device.
    """
    opt, rate = config.optimizer, learning_rate(config.optimizer, config.run.steps)
    mask = functools.partial(decay_mask, config.model)
    adamw = optax.adamw(rate, opt.beta1, opt.beta2, opt.epsilon, weight_decay=opt.weight_decay, mask=mask)
    if opt.name == "adamw":
        return adamw
    if opt.name == "sgd":
        decay = optax.add_decayed_weights(opt.weight_decay, mask)
        return optax.chain(decay, optax.scale_by_learning_rate(rate))

    def labels(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "muon" if is_matrix(config.model, path) else "adamw", params
        )

    return optax.partition({"adamw": adamw, "muon": muon(opt, rate, route)}, labels)
