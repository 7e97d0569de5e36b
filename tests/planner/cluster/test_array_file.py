"""Links in an .npz: numbers come back, and forged or damaged files are refused before anything is allocated."""

import io
import random
import tracemalloc
import zipfile

import numpy as np
import pytest

from paxtrain.errors import UserError
from planner.cluster import array_file

HOSTS = 5


def arrays():
    rng = np.random.default_rng(0)
    measured = rng.random((HOSTS, HOSTS)) > 0.5
    return {"alpha": rng.random((HOSTS, HOSTS)), "bandwidth": rng.random((3, HOSTS, HOSTS)), "measured": measured}


def forged(path, shape, data=b"\0" * 8 * HOSTS * HOSTS, dtype="<f8"):
    """Write a file whose array has a header and a content of its own."""
    member = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(member, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("alpha.npy", member.getvalue() + data)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numbers_come_back(tmp_path, save):
    given = arrays() | {"alpha": np.asfortranarray(arrays()["alpha"]), "scalar": np.float32(3)}
    save(tmp_path / "links.npz", **given)
    found = array_file.read(tmp_path / "links.npz", HOSTS)
    assert found.keys() == given.keys()
    for name, array in given.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_is_found(tmp_path, save):
    """A flipped bit changes nothing that is read, or the file is refused."""
    path, draw = tmp_path / "links.npz", random.Random(0)
    save(path, **arrays())
    good, refused = path.read_bytes(), 0
    for _ in range(200):
        bad, place = bytearray(good), draw.randrange(8 * len(good))
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        try:
            found = array_file.read(path, HOSTS)
        except UserError:
            refused += 1
            continue
        for name, array in found.items():
            if name in arrays():  # else a bit of its name, which the caller does not know then
                np.testing.assert_array_equal(array, arrays()[name])
    assert refused > 100


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((10**6, 10**6), "must be a matrix of 5 x 5"),
        ((10**12, HOSTS, HOSTS), "the header of alpha says"),
        ((0, HOSTS, HOSTS), "the header of alpha says 0 bytes"),  # numpy would leave the content and its checksum alone
        ((2, 2, HOSTS, HOSTS), "must be a matrix"),
        ((HOSTS,), "must be a matrix"),
        ((-1, HOSTS, HOSTS), "cannot read"),
    ],
)
def test_forged_shapes_allocate_nothing(tmp_path, shape, words):
    forged(tmp_path / "links.npz", shape)
    tracemalloc.start()
    with pytest.raises(UserError, match=words):
        array_file.read(tmp_path / "links.npz", HOSTS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_objects_and_large_files_are_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "links.npz", alpha=np.array([{}], object))
    with pytest.raises(UserError, match="must hold numbers"):
        array_file.read(tmp_path / "links.npz", HOSTS)
    np.savez(tmp_path / "links.npz", **arrays())
    monkeypatch.setattr(array_file, "_MOST_BYTES", 500)
    with pytest.raises(UserError, match="at most 500 are read"):
        array_file.read(tmp_path / "links.npz", HOSTS)
