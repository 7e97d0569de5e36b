"""Codecs by name, and those of the library besides low rank.

named.py        a codec from its name, or from package.module:Class, and its options
rounding.py     the base of codecs that round block by block, with error feedback
quantised.py    QuantisedBlocks: blocks of 4 or 8 bits with a scale each
float8.py       Float8Blocks: blocks of 8-bit floats with a scale each
sign.py         Signs: one bit for a number, with a scale for a block
remainder.py    LowRankRemainder: two thin factors, and what they leave out in few bits
topk.py         TopK: the largest numbers and their places
on_links.py     OnLinks: a codec on some links, and messages as they are on the others
recorder.py     Recorder: a codec around another one that keeps a record of a link's messages, for studies

A new codec of the library is a module here, a name in named.py, a row in docs/codecs.md, a point in
paxtrain/study/frontier.py and a case in tests/compress/test_testing.py. The planner asks its methods. A codec of a
user's own needs none of that.
"""
