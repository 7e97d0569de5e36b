"""Findings from the lab's records, a module for each section of the page."""
