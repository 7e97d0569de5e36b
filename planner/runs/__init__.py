"""Measured training runs as a table, whoever made them.

trials.py                               the table's columns, its rows, reading and writing
published.py                            files that others published, as rows
trainers.py                             what predictions need to know of a trainer
"""
