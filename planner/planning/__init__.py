"""The way from a cluster and a configuration to a plan: the search, the compiler's check, the report.

    planning.py    plan(): search, check of memory, report
    options.py     PlanOptions, and their checks
    offers.py      gains of compression that was not asked for
    to_plan.py     a candidate as a plan for the trainer

May import `report` and everything that `report` may import.
"""
