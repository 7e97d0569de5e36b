"""paxtrain: GPT training over a (data, pipe, tensor) mesh."""

import os

# Virtual CPU devices call LAPACK side by side. Threads of its own then spin against each other: a step that compresses
# over data took 3 to 30 times as long on two cores. It is read when LAPACK is loaded, at the first use.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
