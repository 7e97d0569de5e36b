"""The training command as it is, but that its processes share compiled programs: python -m tests.cluster.train.

Otherwise four processes would compile all there is four times, and again at each start.
"""

import runpy

from tests.cluster.programs import share_programs

if __name__ == "__main__":
    share_programs()
    runpy.run_module("paxtrain.train", run_name="__main__")
