"""The training run: its loop, checkpoints, metrics, tables and figures, and text sampled from its checkpoints.

training.py run.py                   paxtrain.train; a run from its first step to its report
prepared.py loop.py                  a run before its steps; the loop around them
checkpoint.py                        checkpoints written, kept and restored
checkpoint_reading.py                the reader of checkpoints, which verifies what it reads
checkpoint_record.py                 what a checkpoint says of itself: metadata and fingerprints
run_lock.py                          one run at a time in a folder
stragglers/                          what makes a run's steps slower, found while it runs
metrics.py report.py plots.py        metrics, tables, figures
sampling.py                          text from a checkpoint
"""
