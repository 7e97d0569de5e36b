"""The memory that virtual CPU devices share, and the bytes that arrays take of it."""

import os

import jax
import pytest

from paxtrain.devices import host
from tests import small


@pytest.mark.parametrize("shard", ["none", "optimizer", "weights"])
def test_bytes_of_a_state_are_those_of_its_arrays(shard):
    trainer = small.trainer(small.config((2, 2, 2), mesh={"shard": shard}))
    state = trainer.init(0)
    there = sum(part.data.nbytes for x in jax.tree.leaves(state) for part in x.addressable_shards)
    assert host.bytes_here(jax.tree.leaves(trainer.abstract_state())) == there > 0


@pytest.mark.parametrize(("limit", "share"), [("max\n", 1.0), (None, 1.0), ("half", 0.5)])
def test_a_container_may_have_less_than_the_machine(tmp_path, monkeypatch, limit, share):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is not None:
        (tmp_path / "max").write_text(limit if limit != "half" else f"{whole // 2}\n")
    monkeypatch.setattr(host, "_LIMITS", (str(tmp_path / "max"),))
    assert host.memory() == int(whole * share)
