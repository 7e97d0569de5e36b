"""An architecture with an embedding and a head of its own: Gemma's scaled embedding and its norm's 1 + scale."""

import jax

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Params
from tests.paxtrain.model.bad_models import Plain


class Scaled(Plain):
    def embedding_scale(self, config: ModelConfig) -> float:
        return config.hidden**0.5

    def head(self, p: Params, y: jax.Array, c: LayerContext) -> jax.Array:
        return nn.norm({"scale": 1 + p["scale"]}, y, c.config.norm_epsilon)
