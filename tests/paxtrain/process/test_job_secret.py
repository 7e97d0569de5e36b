"""The secret of a job: from the environment or from a file that only its owner reads."""

import re

import pytest

from paxtrain.errors import UserError
from paxtrain.process import job_secret


def test_a_secret_is_new_each_time_and_found_again(tmp_path):
    one, other = job_secret.make(), job_secret.make()
    assert one != other and len(one) >= 64
    assert job_secret.find({}) is None
    assert job_secret.find({job_secret.VARIABLE: one}) == one.encode()
    file = tmp_path / "secret"
    file.write_text(f"{other}\n")
    file.chmod(0o600)
    assert job_secret.find({job_secret.FILE_VARIABLE: str(file)}) == other.encode()
    assert job_secret.find({job_secret.VARIABLE: one, job_secret.FILE_VARIABLE: str(file)}) == one.encode()


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("x" * 32, 0o640, r"others can read the job's secret, .*\(mode 640\); say chmod 600"),
        ("short", 0o600, "must be at least 16 letters and digits in one line, got 5 characters"),
        ("x" * 16 + "\nand more", 0o600, "must be at least 16 letters"),
        ("é" * 32, 0o600, "it is no plain text"),
        (None, 0, r"cannot read the job's secret, .*No such file or directory"),
    ],
)
def test_a_file_that_does_not_do_is_named(tmp_path, content, mode, words):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(UserError) as found:
        job_secret.find({job_secret.FILE_VARIABLE: str(file)})
    assert re.search(words, str(found.value)) and "x" * 16 not in str(found.value)
