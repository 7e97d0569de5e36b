"""Published step times of other trainers, beside what the planner predicts for the same model, mesh and batch.

runs.csv           the runs, each with its source
runs.py            a run, and the seconds of its step by what was published of it
prediction.py      its step by the planner's costs and links, with executors of other trainers
halves.py          constants fitted to half of the runs and judged on the other half
posterior.py       what these halves leave open of the constants, and how wide intervals are
ceiling.py         how well measured runs could be ordered at best
replay.py          what a few chosen runs teach, and random ones, and tuners without a model
comparison.py      the table of predicted over published seconds
"""
