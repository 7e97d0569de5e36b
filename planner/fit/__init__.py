"""Fitting the planner's models to measured runs, and scoring their predictions.

May import `cluster` and `cost`.
"""
