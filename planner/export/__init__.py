"""Plans for others' trainers: their flags, the layers of each stage, and which rank runs where.

exported.py     what an export is; the order of the ranks, which all of them share
megatron.py     Megatron-LM's flags
torchtitan.py   a configuration for torchtitan
maxtext.py      MaxText's settings
"""
