"""The way from a cluster and a configuration to a plan: the search, the compiler's check, the report.

planning.py       plan(): search, check of memory, report
inputs.py         the configuration's sections that are read, and the search that they ask for
spans.py          the search for devices that share sequences over several hosts, if it is needed
options.py        PlanOptions, and their checks
settings.py intervals.py    plans priced under many settings of the constants; how sure predicted steps are
offers.py         gains of compression that was not asked for
loss_budget.py    codecs within a budget of loss, by a probe of the model
kept.py           what a search has found, kept on disk
to_plan.py        a candidate as a plan for the trainer
"""
