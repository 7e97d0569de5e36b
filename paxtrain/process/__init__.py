"""This process as one of many: joining the others, stopping on SIGTERM, ending when it or another one fails.

distributed.py               joining the processes of a launch
launchers.py                 what launchers tell a process by variables
stopping.py progress.py      a stop on SIGTERM; what this process does, and its end when it hangs or fails
appointment.py               a step after which all do something together
listening.py                 the addresses at which to listen
setup.py                     settings of the whole process, made by mains alone
compilation_cache.py         when jax's cache of compiled programs is not used
jax_private.py               the private names of jax in use, each with its reason
"""
