"""The training command, except that its processes share compiled programs: python -m tests.cluster.train.

Otherwise four processes would compile all there is four times, and again at each start.
"""

import runpy

from paxtrain.process import jax_private

if __name__ == "__main__":
    jax_private.share_compiled_programs()
    runpy.run_module("paxtrain.train", run_name="__main__")
