"""The start of a job: its nodes and the plan for them, and what is replanned and recorded while it runs.

allocation.py      the nodes that the job got
job_plan.py        the plan for these nodes, old or new
environment.py     the record of each start
replanning.py      what another plan would gain when something has become slow
run_record.py      the record of what a run measured beside its plan's prediction
"""
