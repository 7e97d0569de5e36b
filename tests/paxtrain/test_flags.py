"""Virtual CPU devices that nobody has asked for are told."""

import pytest

from tests import mains

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "8 virtual CPU devices are made for data=2 pipe=2 tensor=2; --cpu_devices sets their number\n"),
        (["--cpu_devices=8"], ""),
    ],
)
def test_the_number_of_virtual_devices_is_told_unless_it_was_given(monkeypatch, capsys, given, told):
    train = mains.load("paxtrain.train")
    monkeypatch.setattr(train, "train_together", lambda *_: None)
    assert mains.run(monkeypatch, train, "--config=tiny", *given) == 0
    assert capsys.readouterr().out == told
