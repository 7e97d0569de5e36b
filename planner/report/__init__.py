"""The planner's report: text, figures and the HTML page.

May import `cluster`, `cost` and `search`.
"""
