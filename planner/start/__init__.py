"""The start of a job: the roll call of its processes, the nodes that it got, and the plan for them.

    allocation.py      the nodes that the job got
    rendezvous.py      a roll call, before the processes join
    job_plan.py        the plan for these nodes, old or new
    environment.py     the record of each start
    run_record.py      the record of what a run measured beside its plan's prediction

May import `measure`, `fit` and `planning`.
"""
