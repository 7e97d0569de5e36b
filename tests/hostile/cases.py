"""The mains with command lines that work, and the cases that are made of them."""

import dataclasses
import functools
import pathlib
import random
from typing import Any

from tests.hostile.corpus import HUGE, LOOKALIKES, NEGATIVE, NO_NUMBERS, TEXTS, damaged


@dataclasses.dataclass(frozen=True)
class Main:
    """A main and a command line of it that works.

    Attributes:
        module: its dotted name.
        arguments: flags; {home} stands for the folder of the files.
        integers: flags whose values are whole numbers.
        numbers: flags whose values are numbers.
        texts: flags whose values are names, paths or lists.
        overrides: prefix of the overrides of a configuration, or "".
        files: names of the files that it reads.
        skip: places ("module:attribute") where the work begins.
        positional: arguments that are no flags.
    """

    module: str
    arguments: dict[str, str]
    integers: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    overrides: str = ""
    files: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()


TRAINING = {
    "config": "{home}/config.py",
    "cpu_devices": "8",
    "config.run.out": "{out}/run",
    "config.data.train": "{home}/train",
    "config.data.validation": "{home}/validation",
}
LAUNCH = {"config": "{home}/config.py", "nodes": "2"}
LAUNCHED = ("nodes", "gpus_per_node", "max_restarts", "signal_ahead", "hosts", "cpu_devices", "min_nodes")
MAINS = (
    Main(
        "paxtrain.train",
        TRAINING,
        ("cpu_devices", "num_processes", "process_id"),
        ("coordinator_timeout",),
        ("config", "plan", "coordinator"),
        "config",
        ("config.py", "train.idx", "train.bin", "tokenizer.json"),
        ("paxtrain.run.run:Run.train",),
    ),
    Main(
        "paxtrain.train",
        TRAINING | {"plan": "{home}/plan.json"},
        (),
        (),
        ("plan",),
        "",
        ("plan.json",),
        ("paxtrain.run.run:Run.train",),
    ),
    Main(
        "planner.plan",
        {
            "model": "{home}/config.py",
            "cluster": "{home}/cluster.json",
            "out": "{out}/plan",
            "oracle": "no",
            "top": "3",
        },
        ("global_batch", "top", "placed", "seed", "tensor_hosts"),
        ("gain", "usable_memory", "quantile"),
        (
            "model",
            "cluster",
            "without",
            "constants",
            "constants_of",
            "compress",
            "backward_ranks",
            "data_ranks",
            "tensor",
            "pipe",
            "micro_batch",
            "virtual_stages",
            "schedules",
            "saves",
            "out",
        ),
        "model",
        ("config.py", "cluster.json"),
    ),
    Main(
        "planner.launch",
        LAUNCH,
        LAUNCHED,
        ("link_timeout",),
        ("config", "plan", "out", "name", "time", "partition", "account", "sbatch", "setup"),
        "",
        ("config.py",),
        (),
        ("slurm",),
    ),
    Main(
        "planner.launch",
        LAUNCH | {"image": "registry/paxtrain:1"},
        LAUNCHED,
        ("link_timeout",),
        ("config", "out", "name", "image", "volume", "mount", "setup"),
        "",
        (),
        (),
        ("kubernetes",),
    ),
    Main(
        "planner.launch",
        {"config": "{home}/config.py", "hosts": "2", "out": "{out}/job"},
        ("hosts", "cpu_devices", "max_restarts"),
        ("link_timeout",),
        ("config", "out"),
        "",
        (),
        ("planner.jobs.local:Local.run",),
        ("local",),
    ),
    Main(
        "planner.supervise",
        {"hosts": "127.0.0.1", "log": "{out}/log"},
        ("host", "port", "per_host"),
        ("link_timeout", "hang_timeout", "phase_timeout", "start_timeout", "settle", "grace", "slow_step"),
        ("hosts", "name", "log", "logs", "report", "finished"),
        "",
        (),
        ("asyncio:run",),
        ("--", "true"),
    ),
    Main(
        "planner.validate",
        {"trials": "{home}/trials.csv", "out": "{out}/validate"},
        ("fit", "folds", "seed", "seeds"),
        (),
        ("trials", "hold_out", "method", "out"),
        "",
        ("trials.csv",),
        ("planner.fit.validation:validate",),
    ),
    Main(
        "planner.profile",
        {"config": "{home}/config.py", "out": "{out}/cluster.json"},
        ("repeats", "compute_hosts", "cpu_devices"),
        ("time_limit", "answer_timeout"),
        ("sizes", "micro_batches", "tensor", "out", "name", "coordinator"),
        "config",
        (),
        ("planner.start.rendezvous:call",),
    ),
    Main(
        "planner.run",
        {"config": "{home}/config.py", "out": "{out}/run", "num_processes": "1", "cpu_devices": "8"},
        ("gpus", "cpu_devices", "compute_hosts"),
        ("profile_seconds", "profile_age", "answer_timeout"),
        ("plan", "out", "host_name", "coordinator"),
        "config",
        ("plan.json",),
        ("planner.start.rendezvous:call",),
    ),
    Main(
        "paxtrain.prepare",
        {"input": "{home}/text.txt", "out": "{out}/data"},
        ("vocab_size", "seed"),
        ("validation_fraction",),
        ("input", "out", "tokenizer", "end_of_text", "vocab", "merges", "json_key"),
        "",
        ("text.txt",),
    ),
    Main(
        "paxtrain.prepare",
        {
            "input": "{home}/lines.jsonl",
            "out": "{out}/data",
            "tokenizer": "{home}/tokenizer.json",
            "end_of_text": "<|endoftext|>",
        },
        (),
        (),
        ("tokenizer", "end_of_text", "json_key"),
        "",
        ("tokenizer.json", "lines.jsonl"),
    ),
    Main(
        "paxtrain.compare",
        {"runs": "{home}/one,{home}/two", "out": "{out}/figure.png"},
        (),
        (),
        ("runs", "out"),
        "",
        ("one/metrics.jsonl",),
    ),
    Main(
        "paxtrain.sample",
        {"checkpoint": "{home}/one", "tokens": "4"},
        ("step", "tokens", "top_k", "seed"),
        ("temperature",),
        ("checkpoint", "prompt"),
        "",
        ("one/tokenizer.json",),
    ),
    Main(
        "paxtrain.huggingface.__main__",
        {"model": "{home}/model", "config": "{home}/config.py", "config.run.out": "{out}/imported"},
        (),
        (),
        ("model", "config"),
        "config",
        ("model/config.json",),
        (),
        ("import",),
    ),
    Main(
        "paxtrain.study.__main__",
        {"config": "{home}/config.py", "out": "{out}/study", "config.compress.data": "all"},
        ("seeds", "steps", "workers"),
        (),
        ("ranks", "out"),
        "config",
        (),
        ("paxtrain.study.runs:Study.run",),
    ),
    Main(
        "planner.convert",
        {},
        (),
        (),
        (),
        "",
        ("amp_homogeneous.json",),
        (),
        ("{home}/amp_homogeneous.json", "{out}/trials.csv"),
    ),
)


@dataclasses.dataclass
class Case:
    """A command line, the files that are changed for it, and whether it can mean nothing.

    Attributes:
        main: the main.
        arguments: its command line; {home} and {out} are replaced.
        files: content of the changed files, by name.
        nonsense: what must be refused; "" if the main may take it.
    """

    main: Main
    arguments: list[str]
    files: dict[str, bytes]
    nonsense: str = ""


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@functools.cache
def keys() -> dict[str, Any]:
    """Return the keys of a configuration and their defaults."""
    from paxtrain.config import Config, to_dict

    return _flat(to_dict(Config()))


def case(number: int, home: pathlib.Path) -> Case:
    """Return the case of a number."""
    rng = random.Random(number)
    main = rng.choices(MAINS, [3 if main.overrides else 1 for main in MAINS])[0]
    arguments, files = dict(main.arguments), {}
    nonsense: dict[str, str] = {}
    for _ in range(rng.choice([1, 1, 1, 2])):
        kinds = ["integers"] * bool(main.integers) + ["numbers"] * bool(main.numbers) + ["texts"] * bool(main.texts)
        kinds += (
            ["files"] * (2 * bool(main.files))
            + ["overrides"] * (4 * bool(main.overrides))
            + ["passed"] * (main.module == "planner.launch")
        )
        kind = rng.choice(kinds)
        if kind == "integers":
            name = rng.choice(main.integers)
            value = rng.choice([*HUGE, *NO_NUMBERS, *LOOKALIKES, *NEGATIVE, "1.5", ""])
            if value in (*NO_NUMBERS, "1.5", "") and value != "0x10":  # which absl takes as 16
                nonsense[name] = f"{name}={value}"
        elif kind == "numbers":
            name = rng.choice(main.numbers)
            value = rng.choice([*HUGE, *NO_NUMBERS, *LOOKALIKES, *NEGATIVE, ""])
            if value in (*NO_NUMBERS, ""):
                nonsense[name] = f"{name}={value}"
        elif kind == "texts":
            name, value = rng.choice(main.texts), rng.choice(TEXTS)
        elif kind == "passed":
            more = rng.choice(
                [
                    "--no_such_flag=1",
                    "--compress=foo",
                    "--config.model.hiden=3",
                    "--config.model.hidden=x",
                    "--gpus=many",
                    "--profile_seconds=nan",
                    "--pipe=two",
                ]
            )
            arguments["--" if "--" in arguments else "-- "] = more
            if main.positional[0] != "kubernetes" or "config" not in more:
                nonsense[more] = more
            continue
        elif kind == "overrides":
            key, default = rng.choice(sorted(keys().items(), key=lambda item: item[0]))
            name = f"{main.overrides}.{key}"
            value = rng.choice([*HUGE, *NO_NUMBERS, *LOOKALIKES, *NEGATIVE, *TEXTS])
            if isinstance(default, int | float) and value in NO_NUMBERS and value != "0x10":
                nonsense[name] = f"{name}={value}"
        else:
            name = rng.choice(main.files)
            files[name] = damaged(rng, name, (home / name).read_bytes())
            continue
        arguments[name] = value
    # A second change may have put something else in its place.
    left = [text for name, text in nonsense.items() if text == f"{name}={arguments.get(name)}" or name == text]
    passed = [value for name, value in arguments.items() if name.startswith("--")]
    line = [f"--{name}={value}" for name, value in arguments.items() if not name.startswith("--")]
    tail = ["--", *passed] if passed else []
    first = main.positional if main.positional[:1] != ("--",) else ()
    return Case(main, [*first, *line, *tail, *(main.positional if not first else ())], files, "; ".join(left))
