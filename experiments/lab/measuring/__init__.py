"""Measurements of the lab, a module for each experiment."""
