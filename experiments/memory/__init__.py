"""The compiler's memory of small models, from which the margin of the planner's closed form follows.

labels.py                the models, a main that compiles them, and how far the closed form is off
gpt2.csv llama.csv       the labels of each family
"""
