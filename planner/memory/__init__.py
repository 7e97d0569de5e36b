"""Bytes of a training step on one device: in closed form, and from the compiler.

closed_form.py margin.py    the estimate, for many candidates at once; its safety margin
compiled.py                 exact bytes, by the compiler
"""
