"""Models from and to Hugging Face's layout.

exporting.py importing.py    checkpoint to model, and back
architectures.py             arrays and config.json of an architecture, both ways
described.py                 the configuration that a config.json describes
files.py                     the files of a model
"""
