"""Who imports whom: the one table of it, which the tests of the rooms and of BUILD read."""

SHARED = {f"paxtrain/{name}.py" for name in ("errors", "files", "knobs", "tables")}  # every room may import them
# The rooms that each room imports, no more and no fewer, besides SHARED. A package's own entry is for what lies
# directly in it and is no main; mains read flags and call the rooms, which never import them.
_TABLE = {
    "compress": "compress/gpu",
    "compress/gpu": "",
    "compress/codecs": "compress",
    "paxtrain/config": "paxtrain/schedule",
    "paxtrain/schedule": "compress",
    "paxtrain/devices": "",
    "paxtrain/process": "",
    "paxtrain/xla": "paxtrain/devices",
    "paxtrain/attention": "compress",
    "paxtrain/model": "compress paxtrain/attention paxtrain/config",
    "paxtrain/architectures": "paxtrain/config paxtrain/model",
    "paxtrain/pipeline": "compress paxtrain/config paxtrain/model paxtrain/schedule",
    "paxtrain/parallel": (
        "compress compress/codecs paxtrain/config paxtrain/model paxtrain/pipeline paxtrain/process paxtrain/schedule"
    ),
    "paxtrain/outer": "compress paxtrain/config paxtrain/model paxtrain/parallel paxtrain/pipeline paxtrain/process",
    "paxtrain/data": "paxtrain/config",
    "paxtrain/run": (
        "compress paxtrain/config paxtrain/data paxtrain/devices paxtrain/huggingface paxtrain/model paxtrain/outer "
        "paxtrain/parallel paxtrain/process paxtrain/profiling"
    ),
    "paxtrain/profiling": (
        "paxtrain/config paxtrain/devices paxtrain/model paxtrain/parallel paxtrain/process "
        "paxtrain/schedule paxtrain/xla"
    ),
    "paxtrain/huggingface": "paxtrain/config paxtrain/data paxtrain/model paxtrain/run",
    "paxtrain/study": (
        "compress/codecs paxtrain/config paxtrain/data paxtrain/devices paxtrain/model paxtrain/parallel "
        "paxtrain/process paxtrain/profiling paxtrain/run paxtrain/xla"
    ),
    "paxtrain/testing": "paxtrain/config paxtrain/model paxtrain/parallel paxtrain/schedule",
    "paxtrain": "paxtrain/config paxtrain/parallel paxtrain/process paxtrain/run paxtrain/schedule",
    "planner/cluster": "paxtrain/config paxtrain/devices",
    "planner/pipeline": "paxtrain/schedule",
    "planner/program": (
        "paxtrain/config paxtrain/model paxtrain/pipeline paxtrain/process paxtrain/schedule paxtrain/xla"
    ),
    "planner/cost": (
        "compress compress/codecs paxtrain/config paxtrain/model paxtrain/schedule planner/cluster planner/pipeline "
        "planner/program"
    ),
    "planner/memory": (
        "paxtrain/config paxtrain/model paxtrain/outer paxtrain/parallel paxtrain/schedule paxtrain/xla planner/cost "
        "planner/program"
    ),
    "planner/placement": "paxtrain/config planner/cluster planner/cost planner/pipeline",
    "planner/search": (
        "compress paxtrain/config paxtrain/model paxtrain/schedule planner/cluster planner/cost planner/memory "
        "planner/pipeline planner/placement planner/program"
    ),
    "planner/report": (
        "paxtrain/config paxtrain/model paxtrain/schedule paxtrain/study planner/cluster planner/cost planner/pipeline "
        "planner/search"
    ),
    "planner/planning": (
        "paxtrain/config paxtrain/devices paxtrain/model paxtrain/schedule paxtrain/study planner/cluster planner/cost "
        "planner/fit planner/memory planner/pipeline planner/placement planner/report planner/runs planner/search"
    ),
    "planner/answers": (
        "paxtrain/config paxtrain/devices paxtrain/model paxtrain/schedule planner/cluster planner/cost planner/memory "
        "planner/pipeline planner/planning planner/report planner/search"
    ),
    "planner/export": "paxtrain/config paxtrain/model paxtrain/schedule",
    "planner/measure": (
        "paxtrain/config paxtrain/devices paxtrain/model paxtrain/parallel paxtrain/pipeline paxtrain/process "
        "planner/cluster planner/cost"
    ),
    "planner/runs": "paxtrain/config paxtrain/schedule",
    "planner/fit": (
        "paxtrain/config paxtrain/devices paxtrain/model paxtrain/schedule planner/cluster planner/cost "
        "planner/pipeline planner/runs"
    ),
    "planner/given": "paxtrain/devices planner/cluster",
    "planner/traces": "paxtrain/config paxtrain/devices paxtrain/model planner/cluster planner/cost",
    "planner/start": (
        "paxtrain/config paxtrain/process paxtrain/profiling paxtrain/run paxtrain/schedule planner/cluster "
        "planner/cost planner/measure planner/planning planner/runs"
    ),
    "planner/jobs": "paxtrain/process planner/cluster",
    "planner": "paxtrain paxtrain/config planner/cluster planner/cost planner/fit planner/planning",
}
# Besides the table: what is imported by a string while a program runs, since the room is above the one that imports it.
BY_STRING = {
    "paxtrain/config/load.py": "paxtrain/huggingface",  # which knows the words of a config.json of Hugging Face's
    "paxtrain/model/families.py": "paxtrain/architectures",  # where a family's file has its name
}
MAY_IMPORT = {room: set(others.split()) for room, others in _TABLE.items()}
# Folders beside the product, which have no rooms.
BESIDE = {
    "configs": ("paxtrain",),
    "experiments": ("compress", "configs", "paxtrain", "planner"),
    "tests": ("compress", "configs", "experiments", "paxtrain", "planner"),
}


def packages() -> dict[str, set[str]]:
    """Return the other packages that each package may import."""
    found = {top: set(others) for top, others in BESIDE.items()}
    for room, others in MAY_IMPORT.items():
        top = room.partition("/")[0]
        found.setdefault(top, set()).update({other.partition("/")[0] for other in others} - {top})
    return found
