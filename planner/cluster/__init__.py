"""A cluster: its hosts, its devices and its measured links, and the file that keeps them.

May import nothing of the planner.
"""
