"""This process as one of many: joining the others, stopping on SIGTERM, reporting to a supervisor.

    distributed.py               joining the processes of a launch
    stopping.py supervised.py    a stop on SIGTERM; the progress file that a supervisor reads
    job_secret.py sealed.py      the secret of a job; messages that only its processes can write
    listening.py                 the addresses at which to listen, and a server that hears nobody else
    setup.py                     settings of the whole process, made by mains alone
    compilation_cache.py         when jax's cache of compiled programs is not used
    failures.py                  phrases of errors that another process has caused
    jax_private.py               the private names of jax in use, each with its reason

May import nothing of the project except `paxtrain.errors`. Supervisors import `supervised` and
the job's secret and messages, which import no jax.
"""
