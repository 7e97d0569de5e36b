"""This process as one of many: it joins the others, is told to stop, and reports to its supervisor.

May import nothing of the project but `paxtrain.errors`; supervisors import it and must stay light.
"""
