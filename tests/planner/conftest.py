import pathlib

import pytest


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of measured data beside the project, where there is one."""
    path = pathlib.Path(__file__).resolve().parents[2].parent / "shared"
    if not path.is_dir():
        pytest.skip(f"needs the measured data in {path}")
    return path
