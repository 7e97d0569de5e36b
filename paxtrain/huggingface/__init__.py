"""Models from and to Hugging Face's layout.

exporting.py importing.py    checkpoint to model, and back
architectures.py             arrays and config.json of an architecture, both ways
files.py                     the files of a model
"""
