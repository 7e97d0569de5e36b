"""The pipeline of a step in seconds: a schedule's table, replayed for many candidates at once.

rows.py                 a table as the rows that are replayed, and where they repeat
simulator.py            the executor's time for the rows, and their timeline
repetition.py           rows that repeat many times, of which few are replayed
layer_split.py          the split of layers into stages whose slowest is the quickest
ideal.py                what a schedule would allow, for comparison
"""
