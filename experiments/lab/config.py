"""The lab's model as a configuration file, for the commands that take one."""

from ml_collections import ConfigDict

from configs.base import gpt
from experiments.lab.models import Split


def get_config() -> ConfigDict:
    return gpt(**{name: section for name, section in Split((1, 1, 1)).values().items() if section})
