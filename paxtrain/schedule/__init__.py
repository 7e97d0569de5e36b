"""Pipeline schedules as data: what each schedule is, its table of rows x stages, and where values wait between rows.

    schedules.py            the schedules; its docstring says what a new one needs
    row_layout.py table.py  ops laid out in rows; the table that comes out
    stage_map.py            which stage holds which virtual stage
    layer_slots.py          where its layers lie if they are of several kinds
    buffers.py              a slot for each value between rows
    proof.py                every op finds its own values
    uneven.py               data ranks with different numbers of micro-batches, in one program
    table_file.py           a schedule from a CSV file, which needs no code
    drawing.py              a table as a picture

Tables are plain numpy: the executor and the planner both read them.
"""
