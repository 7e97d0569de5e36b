"""Models from and to Hugging Face's layout.

exporting.py importing.py    checkpoint to model, and back
architectures.py             names and shapes of the parameters
files.py                     the files of a model
"""
