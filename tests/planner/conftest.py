import pathlib

import pytest

from planner.planning import kept


@pytest.fixture(autouse=True, scope="module")
def plans_are_kept_for_one_file(tmp_path_factory):
    """Keep what a file's tests find from those of other files and runs, which may replace parts of the planner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "FOLDER", str(tmp_path_factory.mktemp("plans")))
        yield


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """Return the folder of measured data beside the project, or skip the test if there is none."""
    path = pathlib.Path(__file__).resolve().parents[2].parent / "shared"
    if not path.is_dir():
        pytest.skip(f"needs the measured data in {path}")
    return path
