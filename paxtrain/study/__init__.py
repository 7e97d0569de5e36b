"""The compression study: the same model trained with different compression, and a page about it.

    variants.py             the configurations that are compared
    runs.py                 the training runs
    probe.py                measurements besides losses: bytes, errors of messages, spectra
    frontier.py             all codecs of the library, loss against bytes
    report.py plots.py      the page, its CSV files and its figures

May import every other room of `paxtrain`.
"""
