"""Constants fitted to measured runs, and the accuracy of the predictions they give.

trial_steps.py stalls.py memory.py      runs as the planner's model, candidate and cluster; their steps, how often they
                                        stall, and their peaks of memory
constants.py fitting.py calibration.py  the constants; their fit; fitted ones and what they predict
validation.py accuracy.py               fitting some runs and predicting the others; scores
design.py layouts.py proposals.py       which few runs teach most; the layouts of a cluster; runs to make next, in words
applied.py                              fitted constants, put into a cluster
"""
