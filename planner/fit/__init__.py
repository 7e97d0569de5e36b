"""Constants fitted to measured runs, and the accuracy of the predictions they give.

trials.py published.py trainers.py      measured runs as a table; published ones converted to it; who ran them
trial_steps.py stalls.py memory.py      these runs as the planner's model, candidate and cluster; their steps, how often
                                        they stall, and their peaks of memory
constants.py calibrate.py calibration.py    the constants; their fit; fitted ones and what they predict
validation.py accuracy.py               fitting some runs and predicting the others; scores
recalibrate.py                          fitted constants, put into a cluster
"""
