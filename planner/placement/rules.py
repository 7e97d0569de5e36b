"""The placement rules of AMP and Pipette, to compare with."""

import numpy as np

from planner.cost import closed_forms
from planner.cost.sizes import MASTER
from planner.cost.step_time import Problem
from planner.placement import anneal
from planner.placement.place import slots_per_host

Array = np.ndarray


def amp_rule(problem: Problem, seed: int = 0) -> Array:
    """Return AMP's placement, hosts [D, P]: devices in host order, tensor ranks fastest, then data, then pipe.

    That is the default of its released code, and DeepSpeed's and Megatron's order. Its measurements of links choose the
    mesh and the split of layers, not hosts.

    Args:
        problem: candidate to place.
        seed: not used; rules are called alike.
    """
    c = problem.candidate
    return (np.arange(c.groups) // slots_per_host(c, problem.cluster)).reshape(c.pipe, c.data).T


def pipette_rule(problem: Problem, seed: int = 0, chains: int = 16, iterations: int = 400) -> Array:
    """Return Pipette's placement, hosts [D, P]: whole nodes in AMP's layout, permuted to minimize its objective.

        P + D    P = max over pipelines of the sum over hops of 2 * bytes_activation / bandwidth, paid once
                 D = all-reduces of the first stage's gradients, embedding included, over nodes and inside them

    The objective is that of its released code, on the first sample of the links, without latency and NIC sharing. The
    published layout needs a node's slots to divide D; if they do not, the same order is cut into nodes.

    Args:
        problem: candidate to place.
        seed: seed of the annealing.
        chains: chains annealed at once.
        iterations: iterations of the annealing.
    """
    c, cluster = problem.candidate, problem.cluster
    layout = amp_rule(problem)
    per_byte = 1 / cluster.samples[0]
    ring = np.unique(layout[:, 0], return_index=True)[1]  # a data rank on each node of the first stage's ring
    inner = -(-c.data // len(ring))
    size = (problem.layer_parameters + problem.embedding_parameters) * MASTER

    def objective(hosts: Array) -> Array:
        pipelines = 2 * problem.message * per_byte[hosts[:, :, :-1], hosts[:, :, 1:]].sum(axis=2)
        nodes = hosts[:, ring, 0]
        between = per_byte[nodes, np.roll(nodes, -1, axis=1)].max(axis=1)
        inside = per_byte[nodes, nodes].max(axis=1)
        over_data = closed_forms.ring(size, len(ring), 1 / between) + closed_forms.ring(size, inner, 1 / inside)
        return pipelines.max(axis=1) + over_data

    rng, hosts = np.random.default_rng(seed), len(cluster.hosts)
    grid = (c.pipe, len(ring)) if c.pipe * len(ring) == hosts else (1, hosts)
    begin = [anneal.Start(layout, rng.permutation(hosts), grid) for _ in range(chains)]
    return anneal.anneal(objective, begin, False, rng, chains, iterations).hosts
