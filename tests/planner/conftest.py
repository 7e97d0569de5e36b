import pathlib

import pytest


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """Return the folder of measured data beside the project, or skip the test if there is none."""
    path = pathlib.Path(__file__).resolve().parents[2].parent / "shared"
    if not path.is_dir():
        pytest.skip(f"needs the measured data in {path}")
    return path
