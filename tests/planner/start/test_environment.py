"""Each start's environment is kept beside those of earlier starts, without secrets."""

import importlib.metadata
import json
import subprocess

from planner.start import environment


def test_every_start_is_kept(tmp_path):
    environment.record(tmp_path, {"number": 1})
    environment.record(tmp_path, {"number": 2})
    assert json.loads((tmp_path / environment.FILE).read_text()) == [{"number": 1}, {"number": 2}]
    assert [path.name for path in tmp_path.iterdir()] == [environment.FILE]


def test_one_that_cannot_be_read_is_put_aside(tmp_path):
    (tmp_path / environment.FILE).write_text('[{"number": 1}, {"num')
    environment.record(tmp_path, {"number": 2})
    assert json.loads((tmp_path / environment.FILE).read_text()) == [{"number": 2}]
    assert (tmp_path / "environment.unreadable").read_text() == '[{"number": 1}, {"num'


def test_variables_of_scheduler_and_runtime_but_no_secrets():
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "x",
        "PAXTRAIN_JOB_SECRET": "x",
        "XLA_FLAGS": "--a",
        "NCCL_DEBUG": "WARN",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "0",
        "JAX_API_KEY": "x",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "x",
        "MY_SLURM_NOTE": "x",
    }
    kept = environment.variables(given)
    assert list(kept) == ["CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "NCCL_DEBUG", "SLURM_JOB_ID", "XLA_FLAGS"]


def test_packages_and_what_else_is_said():
    said = environment.describe(plan="one")
    assert said["packages"]["jax"] == importlib.metadata.version("jax")
    assert said["plan"] == "one" and said["command"] and said["python"].startswith("3.")
    json.dumps(said)


def test_the_revision_tells_changed_files(tmp_path):
    assert environment.revision(tmp_path / "nowhere") is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    clean = environment.revision(tmp_path)
    assert len(clean) == 40
    (tmp_path / "other").touch()
    assert environment.revision(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert environment.revision(tmp_path) == clean + "+changes"
