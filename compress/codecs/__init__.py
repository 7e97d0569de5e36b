"""Codecs by name, and those of the library besides low rank. May import `compress`.

named.py        a codec from its name, or from package.module:Class, and its options
quantised.py    QuantisedBlocks: blocks of 4 or 8 bits with a scale each
topk.py         TopK: the largest numbers and their places
"""
