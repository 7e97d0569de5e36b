"""Pipeline schedules as data: what each schedule is, its table of rows x stages, and where values wait between rows.

May import `compress.policy`, and nothing else of the project. Tables are plain numpy: the executor and the planner
both read them.
"""
