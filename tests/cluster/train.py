"""The training command as it is, but that its processes share compiled programs: python -m tests.cluster.train.

Otherwise four processes would compile all there is four times, and again at each start.
"""

from paxtrain import errors, train
from tests.cluster.programs import share_programs

if __name__ == "__main__":
    share_programs()
    errors.run(train.main, train.define_flags)
