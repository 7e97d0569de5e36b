"""The planner's report: its contents, the text for a terminal, and an HTML page with figures.

May import `cluster`, `cost` and `search`.
"""
