"""The planner's report: its contents, the text for a terminal, and an HTML page with charts.

contents.py further.py           what the report says, of the plan and of further questions (planner/answers)
text.py further_text.py units.py for a terminal; further questions; seconds in words
page.py candidates.py            as a page (page.html, page.css, page.js); all candidates, for the page to filter
charts.py activity.py            charts as Vega-Lite specifications; what each stage does in a step
losses.py                        losses that the study or a probe saw for kinds of compression
traffic.py groups.py             bytes by where they go; what groups that train apart exchange
"""
