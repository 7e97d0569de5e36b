"""This process as one of many: joining the others, stopping on SIGTERM, reporting to a supervisor.

May import nothing of the project except `paxtrain.errors`. Supervisors import `supervised`, which imports no jax.
"""
