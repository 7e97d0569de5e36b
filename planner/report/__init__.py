"""The planner's report: its contents, the text for a terminal, and the HTML page with its figures.

May import `cluster`, `cost` and `search`.
"""
