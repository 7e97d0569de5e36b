"""The start of a job: the nodes that it got, and the plan for them.

allocation.py      the nodes that the job got
job_plan.py        the plan for these nodes, old or new
environment.py     the record of each start
replanning.py      what another plan would gain when something has become slow
run_record.py      the record of what a run measured beside its plan's prediction
"""
