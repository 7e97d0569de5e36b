"""The lab: measurements on emulated hosts, `python -m experiments.lab`.

session.py worker.py        a process on every host, and its tasks
device.py models.py config.py programs.py   the devices, what they train, and compiled programs
laboratory.py records.py measuring/         measurements, line by line, so that a stopped run continues
faults.py job.py            faults, and a job whose devices sleep
findings/ page/             what the records say, as a page
peer/                       PyTorch's trainer of the same model
"""
