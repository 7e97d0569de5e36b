"""The mesh: sizes, order of devices, and the rows of a batch that a process holds."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from paxtrain.config import MeshConfig
from paxtrain.config.axes import MAIN
from paxtrain.errors import UserError
from paxtrain.parallel.mesh import (
    AXES,
    batch_spec,
    cpu_devices,
    from_process_rows,
    host_major,
    make_mesh,
    process_rows,
)


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices)


def test_axes_and_row_major_order():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    assert mesh.axis_names == tuple(AXES) == ("data", "pipe", "context", "tensor")
    assert mesh.axis_types == (AxisType.Auto,) * 4
    np.testing.assert_array_equal(ids(mesh), np.arange(8).reshape(2, 2, 1, 2))
    assert make_mesh(MeshConfig(1, 4, 2)).devices.shape == (1, 4, 1, 2)
    assert make_mesh(MeshConfig(2, 1, 2, context=2)).devices.shape == (2, 1, 2, 2)


def test_groups_of_data_ranks_are_neighbors_and_data_has_two_axes():
    config = MeshConfig(4, 1, 2, shard="weights", shard_group=2)
    mesh = make_mesh(config)
    assert dict(mesh.shape) == {"replica": 2, "data": 2, "pipe": 1, "context": 1, "tensor": 2}
    np.testing.assert_array_equal(ids(mesh).ravel(), ids(make_mesh(MeshConfig(4, 1, 2))).ravel())
    assert (config.devices, config.replicas, config.sharing, config.copies) == (8, 4, 2, 2)
    assert batch_spec(config) == PartitionSpec(("replica", "data"))
    for group in (0, 4):  # all are one group
        assert dict(make_mesh(MeshConfig(4, 1, 2, shard="weights", shard_group=group)).shape) == {
            "data": 4, "pipe": 1, "context": 1, "tensor": 2,
        }  # fmt: skip


def test_a_mesh_that_is_far_too_large_is_refused_without_making_its_devices():
    assert cpu_devices(MeshConfig(2, 2, 2), 1) == 8 and cpu_devices(MeshConfig(2, 2, 2), 4) == 2
    large = MeshConfig(10_000, 2, 2)
    assert cpu_devices(large, 1) == 1024
    with pytest.raises(UserError, match="is 40000 devices, but there are 8"):
        make_mesh(large)


def test_a_plans_order():
    order = [1, 2, 0, 5, 6, 7, 3, 4]
    np.testing.assert_array_equal(ids(make_mesh(MeshConfig(2, 2, 2), order)), np.reshape(order, (2, 2, 1, 2)))


def test_devices_are_counted_in_order_unless_their_order_is_given(monkeypatch):
    shuffled = [jax.devices()[i] for i in (5, 0, 7, 2, 1, 6, 3, 4)]
    given = ids(make_mesh(MeshConfig(2, 2, 2), devices=shuffled))
    np.testing.assert_array_equal(given.ravel(), [5, 0, 7, 2, 1, 6, 3, 4])
    monkeypatch.setattr(jax, "devices", lambda: shuffled)
    np.testing.assert_array_equal(ids(make_mesh(MeshConfig(2, 2, 2))), np.arange(8).reshape(2, 2, 1, 2))


def test_a_plan_counts_devices_host_after_host_as_it_lists_them(monkeypatch):
    devices = [SimpleNamespace(process_index=i // 2, id=i) for i in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    found = host_major(("c", "a", "b"), ["a", "b", "c", "a"])  # two processes on host a
    assert [d.id for d in found] == [4, 5, 0, 1, 6, 7, 2, 3]
    with pytest.raises(UserError, match="the plan is for the hosts c, a, but the processes run on a, b, c"):
        host_major(("c", "a"), ["a", "b", "c", "a"])


def test_part_of_the_devices():
    mesh = make_mesh(MeshConfig(2, 1, 2), devices=jax.devices()[4:])
    np.testing.assert_array_equal(ids(mesh).ravel(), [4, 5, 6, 7])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 1), (4, 4, 1)])
def test_sizes_that_do_not_multiply_to_the_devices(sizes):
    with pytest.raises(UserError) as error:
        make_mesh(MeshConfig(*sizes))
    message = str(error.value)
    for name, size in zip(MAIN, sizes):
        assert f"mesh.{name}={size}" in message
    assert f"is {np.prod(sizes)} devices, but there are 8; choose sizes whose product is 8" in message


def test_one_process_holds_all_rows():
    sharding = NamedSharding(make_mesh(MeshConfig(4, 2, 1)), PartitionSpec("data"))
    assert process_rows(sharding, (8, 3)) == list(range(8))


def test_rows_of_a_process_come_once_and_ascending():
    """Two of four data ranks, each on two devices that hold the same rows."""
    slices = {"a": slice(6, 8), "b": slice(2, 4), "c": slice(6, 8), "d": slice(2, 4)}
    some = SimpleNamespace(
        addressable_devices_indices_map=lambda shape: {name: (rows, slice(None)) for name, rows in slices.items()}
    )
    assert process_rows(some, (8, 3)) == [2, 3, 6, 7]
    whole = SimpleNamespace(addressable_devices_indices_map=lambda shape: {"a": (slice(None), slice(None))})
    assert process_rows(whole, (4, 3)) == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [(4, 2, 1), (1, 2, 4), (8, 1, 1)])
def test_a_global_array_of_a_processs_rows(sizes):
    sharding = NamedSharding(make_mesh(MeshConfig(*sizes)), PartitionSpec("data"))
    values = np.arange(24, dtype=np.int32).reshape(8, 3)
    rows = process_rows(sharding, values.shape)
    array = from_process_rows(sharding, values.shape, rows, values[rows])
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, values)
    backwards = rows[::-1]
    np.testing.assert_array_equal(from_process_rows(sharding, values.shape, backwards, values[backwards]), values)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
