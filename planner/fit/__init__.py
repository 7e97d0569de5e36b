"""Constants fitted to measured runs, and the accuracy of the predictions they give.

trials.py published.py                  measured runs as a table; published ones converted to it
trial_steps.py                          these runs as the planner's model, candidate and cluster; their steps
constants.py calibrate.py               the constants; their fit
validation.py accuracy.py               fitting some runs and predicting the others; scores
recalibrate.py                          fitted constants, put into a cluster
"""
