"""The compression study: the same model trained with different compression, and a page about it.

variants.py             the configurations that are compared
runs.py                 the training runs
finished.py             their results on disk, as each ends
programs.py             their compiled steps, shared by variants
measurements.py         measurements besides losses: bytes, errors of messages, spectra
frontier.py             all codecs of the library, loss against bytes
loss_probe.py           what codecs cost on a user's own model
loss_probe_file.py      the same as a file, which the planner reads
report.py plots.py      the page, its CSV files and its figures
"""
