"""Who may import whom: the one table of it, which the tests of the rooms and of BUILD read."""

SHARED = {f"paxtrain/{name}.py" for name in ("errors", "files", "knobs", "tables")}  # every room may import them
# Rooms that each room may import, besides itself and SHARED. A package's own entry is for its mains, which lie
# directly in it. They read flags and call the rooms, which never import them.
_STEP = ("compress", "compress/codecs", "paxtrain/config", "paxtrain/model", "paxtrain/schedule", "paxtrain/pipeline")
_DEVICES = ("paxtrain/process", "paxtrain/data", "paxtrain/devices", "paxtrain/xla")
_RUN = (*_DEVICES, "paxtrain/parallel", "paxtrain/outer", "paxtrain/run")
_TRAINER = (*_STEP, *_RUN, "paxtrain/profiling")
_COST = ("planner/cluster", "planner/pipeline", "planner/cost")
_PREDICTION = (*_COST, "planner/memory", "planner/placement")
_PLANNING = (*_PREDICTION, "planner/search", "planner/report", "planner/planning")
MAY_IMPORT = {
    "compress": ("compress/gpu",),
    "compress/gpu": (),
    "compress/codecs": ("compress",),
    "paxtrain/config": ("paxtrain/schedule",),
    "paxtrain/schedule": ("compress",),
    "paxtrain/devices": (),
    "paxtrain/process": (),
    "paxtrain/xla": ("paxtrain/devices",),
    "paxtrain/model": ("compress", "paxtrain/config"),
    "paxtrain/pipeline": _STEP[:-1],
    "paxtrain/parallel": (*_STEP, "paxtrain/process"),
    "paxtrain/outer": (*_STEP, "paxtrain/process", "paxtrain/parallel"),
    "paxtrain/data": ("paxtrain/config",),
    "paxtrain/run": (*_STEP, *_RUN, "paxtrain/profiling"),
    "paxtrain/profiling": (
        "paxtrain/config",
        "paxtrain/devices",
        "paxtrain/model",
        "paxtrain/parallel",
        "paxtrain/process",
        "paxtrain/run",
        "paxtrain/schedule",
        "paxtrain/xla",
    ),
    "paxtrain/huggingface": ("paxtrain/config", "paxtrain/model", "paxtrain/data", "paxtrain/run"),
    "paxtrain/study": _TRAINER,
    "paxtrain": (*_TRAINER, "paxtrain/huggingface", "paxtrain/study"),
    "planner/cluster": ("paxtrain/config", "paxtrain/devices"),
    "planner/pipeline": ("paxtrain/schedule",),
    "planner/cost": (
        "compress",
        "compress/codecs",
        "paxtrain/config",
        "paxtrain/devices",
        "paxtrain/schedule",
        *_COST,
    ),
    "planner/memory": (*_TRAINER, "planner/cost"),
    "planner/placement": ("paxtrain/config", *_COST),
    "planner/search": (*_STEP, "paxtrain/devices", *_PREDICTION),
    "planner/report": (*_TRAINER, "paxtrain/study", *_PREDICTION, "planner/search"),
    "planner/planning": (*_TRAINER, "paxtrain/study", *_PLANNING),
    "planner/answers": (*_TRAINER, *_PLANNING),
    "planner/export": ("paxtrain/config", "paxtrain/schedule"),
    "planner/measure": (*_TRAINER, "planner/cluster", "planner/cost"),
    "planner/fit": ("paxtrain/config", "paxtrain/devices", "paxtrain/schedule", *_COST),
    "planner/start": (*_TRAINER, *_PLANNING, "planner/measure", "planner/fit"),
    "planner/jobs": ("paxtrain/config", "paxtrain/process", "planner/memory"),
}
MAY_IMPORT["planner"] = (
    "paxtrain",
    *_TRAINER,
    *(room for room in MAY_IMPORT if room.startswith("planner/")),
)
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
