"""Properties that every model has, for models of one's own: `check_model` raises if one does not hold.

    python -m paxtrain.testing mymodels:ParallelBlock            # or, from Python:
    from paxtrain.testing import check_model
    check_model("mymodels:ParallelBlock")

models.py    a model on meshes and schedules, against one device; a state that is read again
layers.py    one layer on one device: what it sees, what it keeps finite, what tensor parallelism changes
"""

from paxtrain.testing.models import check_model as check_model
