"""Constants fitted to measured runs, and the accuracy of the predictions they give.

    trials.py published.py                  measured runs as a table; published ones converted to it
    pipelines.py trial_model.py             arrays of these runs; their time from a few constants
    constants.py calibrate.py               the constants; their fit
    validation.py accuracy.py               fitting some runs and predicting the others; scores
    recalibrate.py                          fitted constants, put into a cluster

May import `cluster` and `cost`.
"""
