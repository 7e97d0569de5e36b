"""Reasons: why each neighbor of the chosen plan was not chosen, and why no candidate compresses."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from compress.policy import largest_rank, too_large
from paxtrain.config import SAVE_MODES, SPLIT_SAVES, ModelConfig
from paxtrain.config.axes import AXES, DATA, MAIN, PIPE, TENSOR, batch_axes, in_words, inside_axes, sequence_parts
from paxtrain.errors import UserError
from paxtrain.schedule.schedules import name_of, spec_of
from paxtrain.tables import times
from planner.cost import compute
from planner.cost.candidate import NO_GROUPS
from planner.cost.coded import Coded
from planner.search.enumeration import SUMS, context_forms, listed, message_shape, sharding_problem
from planner.search.search import Found, Search
from planner.search.space import COLUMNS, Choices, Column, Space, numbers_of

_FREE = tuple(name for name in COLUMNS if name not in (*AXES, "micro_batch", "micro_batches"))  # not changed by factors


def _moves(now: dict[str, int], search: Search) -> Iterator[dict[str, int]]:
    """Yield the chosen plan's columns with one thing changed; sizes of the mesh change in pairs."""
    tried = [name for name in AXES if name in MAIN or search.space.column(name).max() > 1]
    for more, less in itertools.combinations(tried, 2):
        for a, b in ((more, less), (less, more)):
            if now[b] % 2 == 0:
                yield now | {a: now[a] * 2, b: now[b] // 2}
    for factor in (0.5, 2.0):
        if now["micro_batch"] * factor >= 1:
            yield now | {"micro_batch": int(now["micro_batch"] * factor)}
    for column in _FREE:
        same = search.space.pipe == now[PIPE] if column in ("schedule", "shard", "shard_group") else slice(None)
        if column == "context_form":
            same = search.space.shared == sequence_parts({axis: now[axis] for axis in AXES})
        for value in np.unique(getattr(search.space, column)[same]).tolist():
            if value != now[column]:
                yield now | {column: value}


def _described(changed: dict[str, int], now: dict[str, int]) -> str:
    words = []
    for column, value in changed.items():
        if value != now[column] and (column != "backward_rank" or changed["backward"]):
            words.append(f"{column}={COLUMNS.get(column, Column()).value(value)}")
    return " ".join(words)


def without_groups(search: Search, chosen: Found) -> list[str]:
    """Return a sentence on what training would take if all data ranks trained together; none if they do.

    Args:
        search: search that chose.
        chosen: chosen plan.
    """
    if chosen.candidate.apart == 1:
        return []
    choices = dataclasses.replace(search.choices, outer=NO_GROUPS, coded=_alone(search.coded))
    budget = dataclasses.replace(search.budget, outer=NO_GROUPS, coded=choices.coded)
    try:
        other = Search(search.cluster, search.model, search.global_batch, choices, budget, search.options)
        best = other.run(top=1, placed=1).ranked[0]
    except UserError as error:
        return [f"without groups: {error}"]
    c = best.candidate
    mesh = f"{in_words(c.sizes)} micro_batch={c.micro_batch} {c.schedule}"
    longer = _longer(best.seconds / chosen.seconds - 1)
    return [f"without groups: the best plan found, {mesh}, takes {best.seconds:.4g} s, {longer}"]


def _longer(share: float, digits: int = 1) -> str:
    """Return the share by which something takes longer, in words; beyond 100%, how many times as long it takes.

    Args:
        share: the share; negative if it takes less.
        digits: decimals of the percentage.
    """
    if share > 1:
        return f"{times(1 + share)} as long"
    return f"{share:.{digits}%} more" if share >= 0 else f"{-share:.{digits}%} less"


def _alone(coded: Coded) -> Coded:
    """Return codecs without the one between groups."""
    names = tuple(x for x in coded.names if x[0] != "outer")
    options = tuple(x for x in coded.options if x[0] != "outer")
    return dataclasses.replace(coded, outer=None, names=names, options=options)


def neighbours(search: Search, chosen: Found, global_batch: int) -> list[str]:
    """Return a sentence for each neighbor of the chosen plan: what it is, and why it was not chosen.

    Figures of neighbors are those of the best of the placements that were found for their mesh.

    Args:
        search: search that chose.
        chosen: chosen plan.
        global_batch: sequences of an optimizer step.
    """
    columns = (*AXES, "micro_batch", *_FREE)
    table = np.stack([search.space.column(column).astype(int) for column in columns], axis=1)
    now = numbers_of(chosen.candidate)
    found: list[str] = []
    for changed in _moves(now, search):
        spec = spec_of(name_of(changed["schedule"]))
        if changed["schedule"] != now["schedule"] and spec.interleaves:
            changed = changed | {"chunks": 2}
        elif not spec.interleaves:
            changed = changed | {"chunks": 1}
        if COLUMNS["shard"].value(changed["shard"]) not in SUMS:
            changed = changed | {"shard_group": 0}
        if changed["context_form"] not in context_forms(search.model, {axis: changed[axis] for axis in AXES}):
            changed = changed | {"context_form": 0}
        if changed["backward"] == 0:
            changed = changed | {"backward_rank": 0}
        elif changed["backward_rank"] == 0:
            changed = changed | {"backward_rank": int(max(search.space.backward_rank))}
        what = _described(changed, now)
        if not what or any(line.startswith(what + ":") for line in found):
            continue
        row = [changed[column] for column in columns]
        where = np.flatnonzero((table == row).all(axis=1))
        found.append(f"{what}: {_why(search, chosen, where, changed, global_batch)}")
    return found


def _why(search: Search, chosen: Found, where: np.ndarray, changed: dict[str, int], global_batch: int) -> str:
    if not len(where):
        return _invalid(search, changed, global_batch)
    i = int(where[0])
    if search.bytes[i] > search.limit:
        over = (search.bytes[i] - search.limit) / 1e9
        return f"does not fit, needs {search.bytes[i] / 1e9:.1f} GB per device, {over:.1f} GB too much"
    if search.bounds[i] >= chosen.seconds:
        longer = _longer(search.bounds[i] / chosen.seconds - 1)
        return f"takes {search.bounds[i]:.4g} s at least, {longer}, by its lower bound"
    if not (others := search.simulate([i])):
        return "on none of the known placements would data ranks get different numbers of micro-batches"
    [other] = others
    slower = other.seconds / chosen.seconds - 1
    if slower < 0:
        why = "too little for what it changes in training"
        if other.score(search.options.gain) < chosen.score(search.options.gain):
            why = "but it did not fit once compiled, or was not among the ranked"
        return f"simulated {other.seconds:.4g} s, {_longer(slower, 2)}, {why}"
    return f"simulated {other.seconds:.4g} s, {_longer(slower, 2)}" if slower > 1e-9 else "takes the same time"


def _invalid(search: Search, changed: dict[str, int], global_batch: int) -> str:
    """Return why there is no such candidate."""
    cluster, model = search.cluster, search.model
    data, pipe, micro = (changed[name] for name in (DATA, PIPE, "micro_batch"))
    if cluster.devices_per_host % math.prod(changed[name] for name in inside_axes()):
        return f"{' x '.join(inside_axes())} groups stay inside a host of {cluster.devices_per_host} devices"
    if cluster.parts is not None and math.prod(changed[name] for name in inside_axes()) != cluster.devices_per_host:
        return f"{' x '.join(inside_axes())} groups fill {len(cluster.blocks[0])} hosts here"
    for axis in inside_axes():
        parts = changed[axis]
        for name, size in model.split_by(axis).items():
            if size % parts:
                vocabulary = model.vocabulary_for(parts) if axis == TENSOR else 0
                fits = f"; model.vocab_multiple={vocabulary} would fit" if vocabulary else ""
                return f"{axis}={parts} does not divide model.{name}={size}{fits}"
    if wrong := model.undivided({axis: changed[axis] for axis in inside_axes()}):
        return f"{' x '.join(inside_axes())} does not divide the model's {in_words(wrong)}"
    if pipe * changed["chunks"] > model.layers:
        return f"{pipe * changed['chunks']} virtual stages are more than the model's {model.layers} layers"
    if global_batch % math.prod(changed[name] for name in (*batch_axes(), "micro_batch")):
        ranks = " x ".join(f"{name}={changed[name]}" for name in batch_axes())
        return f"{ranks} x micro_batch={micro} does not divide the global batch of {global_batch}"
    if (apart := search.choices.apart(data)) == 1 and search.choices.outer.every:
        return "groups that train apart need several data ranks"
    if data % apart:
        return f"{apart} groups do not divide data={data}"
    if changed["uneven_data"]:
        return "data ranks that are alike get equal numbers of micro-batches"
    if changed["data_rank"] and changed["shard_group"]:
        return f"groups that share weights send each other codes with compress.data.inside={changed['shard_group']}"
    if pipe == 1:
        return "one stage has no schedule and no messages"
    if spec_of(name_of(changed["schedule"])).splits and SAVE_MODES[changed["save"]] not in SPLIT_SAVES:
        return f"a split backward needs save={' or '.join(SPLIT_SAVES)}"
    return "not among the choices that the search was given"


def require_compression(space: Space, model: ModelConfig, choices: Choices) -> None:
    """Require that a candidate compresses each kind of messages that may be, if candidates have such messages.

    Args:
        space: candidates.
        model: model to split.
        choices: what may be compressed; the space has been made of these choices, or of wider ones.

    Raises:
        UserError: at the ranks, or with the codecs, that are allowed there is none.
    """
    several, kinds = space.take(np.flatnonzero(space.pipe > 1)), set(choices.backward) - {"none"}
    if kinds and len(several) and not several.backward.any():
        raise UserError(_why_no_messages(several, model, choices))
    several = space.take(np.flatnonzero(space.together > 1))
    if choices.data_ranks and len(several) and not several.data_rank.any():
        raise UserError(_why_no_gradients(several, model, choices))
    if (
        choices.coded.weights is not None
        and any(one != "none" for one in choices.shards)
        and len(several)
        and not several.zero1.any()
    ):
        sizes, where = several.layer_sizes
        raise UserError(sharding_problem(choices, model, int(several.data[0]), sizes[where[0]], "optimizer"))


def _why_no_messages(space: Space, model: ModelConfig, choices: Choices) -> str:
    """Return why no candidate compresses gradients between stages; the arguments are those of `require_compression`."""
    columns = zip(*(x.tolist() for x in (space.parts, space.micro_batch)))
    largest = max((message_shape(model, *row) for row in set(columns)), key=math.prod)
    if choices.coded.backward is not None:
        return choices.coded.message_problem("backward", largest, model.dtype, choices.min_ratio)
    n, k = math.prod(largest[:-1]), largest[-1]
    return _too_large("backward", choices.backward_ranks, f"messages are at most {n} x {k}", (n, k), choices.min_ratio)


def _why_no_gradients(space: Space, model: ModelConfig, choices: Choices) -> str:
    """Return why no candidate compresses gradients over data; the arguments are those of `require_compression`."""
    coded, (sizes, where) = choices.coded, space.layer_sizes
    different = sorted(set(zip(where.tolist(), space.together.tolist())))
    meshes = [(compute.kernels(model, sizes[i]), together) for i, together in different]
    if coded.data is not None:
        return coded.data_problem(*meshes[0], choices.min_ratio)

    def useful(matrix: tuple[int, int]) -> int:
        return largest_rank(*matrix, choices.min_ratio)

    cut = filter(None, (coded.parts(*mesh) for mesh in meshes))
    best = max((min(parts, key=useful) for parts in cut), key=useful, default=None)
    if best is None:
        return (
            f"compress.data.inside={coded.inside} cuts no kernel of a layer on a device into equal parts; choose "
            "another number of ranks, or leave it out"
        )
    what = f"the smallest matrix of a layer on a device is {best[0]} x {best[1]}"
    return _too_large("data", choices.data_ranks, what, best, choices.min_ratio)


def _too_large(place: str, ranks: tuple[int, ...], what: str, matrix: tuple[int, int], min_ratio: float) -> str:
    """Return a sentence about ranks that all save too little.

    Args:
        place: "backward" or "data".
        ranks: the ranks that are allowed.
        what: clause that names the matrix.
        matrix: its rows and columns.
        min_ratio: factor by which it must become smaller.
    """
    largest = largest_rank(*matrix, min_ratio)
    return too_large(f"--{place}_ranks={listed(ranks)}", what, largest, min_ratio)
