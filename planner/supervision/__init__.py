"""Supervision: watching the processes of a run, and naming the first cause when it fails.

    supervising.py supervisor.py            one host's command under a supervisor
    worker_process.py memory_folder.py      the worker: started, watched, ended; where it reports its progress
    peer_connections.py peer_board.py       connections between supervisors; the entries that all share
    entries.py                              the kinds of entries, and their types
    addresses.py                            addresses of the supervisors
    first_cause.py                          the rule that names the first cause
    watchdog.py slow_step.py host_speed.py  slow steps, and the host or link behind them

May import nothing else of the planner.
"""
