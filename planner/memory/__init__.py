"""Bytes of a training step on one device: in closed form, and from the compiler.

shape.py           many candidates as columns
closed_form.py     the estimate
codec_states.py    its part for the states of codecs
margin.py          its safety margin
compiled.py        exact bytes, by the compiler
"""
