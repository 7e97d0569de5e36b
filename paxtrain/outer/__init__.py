"""Groups of data ranks that train apart, and exchange the differences that they have made every H steps (DiLoCo).

trainer.py      GroupedTrainer: the step of all groups, their exchange and state; trainer_of: the trainer of a run
exchange.py     the mean of the groups' differences, as they are or through a reducer
fragments.py    the arrays of each fragment, which may be exchanged one after another (Streaming DiLoCo)
timetable.py    the steps at which fragments are exchanged
"""
