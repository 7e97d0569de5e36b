"""Measured training runs as a table, whoever made them, and the facts of the trainers that made them.

trials.py                               the table's columns, its rows, reading and writing
published.py logs.py                    files that others published, and logs of runs, as rows
trainers.py nanotron.py                 what predictions need to know of a trainer; how nanotron splits layers
"""
