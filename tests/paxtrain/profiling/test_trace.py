"""Traces as the profiler writes them on CPUs and GPUs, cut down to the essentials, and the times read from them."""

from jax.profiler import ProfileData

from paxtrain.profiling.trace import READ, STEP, Part, read

PARTS = {
    "loop": None,
    "multiply": Part("work", link=False),
    "add": Part("more", link=False),
    "send": Part("link", True),
}
STEPS = {"python": [(STEP, 1, 20), (STEP, 30, 20)]}
STATS = ("hlo_op", "hlo_module", "device_ordinal", "_p", "_c")
RECORD, START, STOP = (f"ThreadpoolListener::{name}" for name in ("Record", "StartRegion", "StopRegion"))


def trace(**planes):
    """Return a trace of events (name, start, duration in ms, stats), given by plane and line."""
    text = []
    for number, (plane, lines) in enumerate(planes.items()):
        names = sorted({event[0] for events in lines.values() for event in events})
        text.append(f'planes {{ id: {number} name: "{plane}"')
        for line, events in lines.items():
            text.append(f'lines {{ name: "{line}"')
            for name, start, duration, *stats in events:
                text.append(f"events {{ metadata_id: {names.index(name) + 1}")
                text.append(f"offset_ps: {start * 10**9} duration_ps: {duration * 10**9}")
                for key, value in (stats[0] if stats else {}).items():
                    shown = f'str_value: "{value}"' if isinstance(value, str) else f"uint64_value: {value}"
                    text.append(f"stats {{ metadata_id: {STATS.index(key) + 1} {shown} }}")
                text.append("}")
            text.append("}")
        for kind, values in (("event", names), ("stat", STATS)):
            for i, name in enumerate(values, 1):
                text.append(f'{kind}_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}')
        text.append("}")
    return ProfileData.from_text_proto("\n".join(text))


def in_milliseconds(x):
    return round(x * 1e3, 6)


def times(**planes):
    """Return the spans of every device as (start, end, part) in ms."""
    steps, spans = read(trace(**planes), "jit_step", PARTS)
    assert [tuple(map(in_milliseconds, step)) for step in steps] == [(1, 21), (30, 50)]
    return {
        d: sorted((in_milliseconds(s), in_milliseconds(e), p.name) for s, e, p in some) for d, some in spans.items()
    }


def op(name, start, duration, device=0, number=0, module="jit_step"):
    stats = {"hlo_op": name, "hlo_module": module, "device_ordinal": device, "_p": number}
    return (name, start, duration, stats)


def cpu(**threads):
    return times(**{"/host:CPU": threads | STEPS})


def test_an_instruction_on_a_thread_takes_its_time_from_what_it_lies_in():
    found = cpu(
        a=[op("loop", 1, 19), op("multiply", 2, 10), op("add", 4, 2), op("add", 6, 1)], b=[op("add", 2, 9, device=7)]
    )
    assert found == {0: [(2, 4, "work"), (4, 6, "more"), (6, 7, "more"), (7, 12, "work")], 7: [(2, 11, "more")]}


def test_a_task_of_the_pool_belongs_to_what_put_it_into_the_queue():
    found = cpu(
        a=[op("multiply", 2, 3), (RECORD, 3, 0, {"_p": 1})],
        b=[(START, 6, 0, {"_c": 1}), (RECORD, 7, 0, {"_p": 2}), (STOP, 9, 0)],
        c=[
            (START, 8, 0, {"_c": 2}),
            op("add", 10, 1, device=7),
            (STOP, 12, 0),
            (START, 13, 0, {"_c": 99}),
            (STOP, 14, 0),
        ],
    )
    assert found == {0: [(2, 5, "work"), (6, 9, "work"), (8, 10, "work"), (11, 12, "work")], 7: [(10, 11, "more")]}


def test_what_waits_in_the_queue_behind_a_collective_does_not_run():
    begun = [op("multiply", 2, 1, number=1), (RECORD, 2, 0, {"_p": 5}), op("send", 3, 6, number=2)]
    found = cpu(a=[*begun, (START, 10, 0, {"_c": 5}), (STOP, 11, 0), ("end: multiply", 11, 0, {"_c": 1})])
    assert found == {0: [(2, 3, "work"), (3, 9, "link"), (10, 11, "work")]}


def test_a_collective_is_in_flight_until_its_end_wherever_that_is_told():
    found = cpu(a=[op("send", 3, 1, number=4), op("multiply", 4, 3)], b=[("end: send", 9, 0, {"_c": 4})])
    assert found == {0: [(3, 9, "link"), (4, 7, "work")]}


def test_other_programs_and_other_events_do_not_count_as_this_one():
    found = cpu(a=[("ThunkExecutor::Execute", 1, 30), op("multiply", 2, 1, module="jit_else"), op("unknown", 4, 1)])
    assert found == {0: [(2, 3, "other"), (4, 5, "other")]}


def test_waits_for_batches_are_every_devices():
    found = cpu(a=[op("multiply", 2, 1), op("multiply", 4, 1, device=7), (READ, 5, 3)])
    assert found == {0: [(2, 3, "work"), (5, 8, "input")], 7: [(4, 5, "work"), (5, 8, "input")]}


def test_a_trace_of_gpus_is_read_from_its_streams():
    ours = {"hlo_module": "jit_step"}
    streams = {
        "Stream #13(Compute)": [
            ("kernel", 2, 3, {"hlo_op": "multiply"} | ours),
            ("graph", 6, 1, {"hlo_op": "loop"} | ours),
        ],
        "Stream #14": [("ncclSendRecv", 4, 4, {"hlo_op": "send"} | ours), ("memcpy", 9, 1)],
        "XLA Ops": [("multiply", 2, 3, {"hlo_op": "multiply"} | ours)],
    }
    launches = {"launch": [("cuLaunchKernel", 0, 1, {"hlo_op": "multiply"} | ours)]}
    found = times(**{"/host:CPU": STEPS | launches, "/device:GPU:3": streams})
    assert found == {3: [(2, 5, "work"), (4, 8, "link"), (6, 7, "other"), (9, 10, "other")]}
