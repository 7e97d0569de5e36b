"""Constants fitted to measured runs, and the accuracy of the predictions they give.

May import `cluster` and `cost`.
"""
