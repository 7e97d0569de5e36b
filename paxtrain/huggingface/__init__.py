"""Models from and to Hugging Face's layout.

exporting.py                 checkpoint to model
importing.py                 model to the weights with which a run begins
conversion.py                arrays and config.json of an architecture, both ways
described.py                 the configuration that a config.json describes
files.py                     the files of a model
"""
