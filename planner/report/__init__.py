"""The planner's report: its contents, the text for a terminal, and an HTML page with figures.

contents.py further.py           what the report says, of the plan and of further questions (planner/answers)
text.py further_text.py page.py  for a terminal; further questions; as an HTML page
losses.py                        losses that the study or a probe saw for kinds of compression
traffic.py groups.py             bytes by where they go; what groups that train apart exchange
drawings.py gantt.py svg.py      the page's figures
"""
