"""Reading files of data executes nothing; ruff's rules S (pyproject.toml) say so of all code of the project."""

import os
import shlex

import numpy as np
import pytest

from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster
from tests import sources
from tests.planner.examples import cluster
from tests.sources import ROOT


class Touch:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {shlex.quote(str(self.canary))}",)


def test_arrays_of_objects_are_not_unpickled(tmp_path):
    """numpy's .npz may hold pickles, where its reader is told to take them."""
    canary = tmp_path / "canary"
    cluster(80, 1).save(tmp_path / "cluster.json")  # with its links in an .npz beside it
    Cluster.load(tmp_path / "cluster.json")
    np.savez(tmp_path / "cluster.npz", alpha=np.array([Touch(canary)], object), bandwidth=np.array([1.0]))
    with pytest.raises(UserError):
        Cluster.load(tmp_path / "cluster.json")
    assert not canary.exists()
    with np.load(tmp_path / "cluster.npz", allow_pickle=True) as file:
        file["alpha"]
    assert canary.exists()  # the control


def test_no_reader_is_told_to_take_pickles():
    paths = [path for path in sources.project() if path.startswith(("compress", "paxtrain", "planner"))]
    assert len(paths) > 100
    assert [path for path in paths if "allow_pickle" in (ROOT / path).read_text()] == []
