"""Pipeline schedules as data: what each schedule is, its table of rows x stages, and where values wait between rows.

`spec` has the schedules, `orders` lays out their rows, `table` is what comes out of it, `buffers` gives each value a
slot, and `proof` shows that every op finds its own values. May import `compress.policy`, and nothing else of the
project. Tables are plain numpy: the executor and the planner both read them.
"""
