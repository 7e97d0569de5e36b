"""Shared parts of all experiments: the folder of results, the number of repeats, the budget of time."""

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.hosts import hosts
from experiments.hosts.scenario import Scenario
from experiments.lab.models import Split
from experiments.lab.records import Records
from experiments.lab.session import Session
from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster

# Of messages whose times say the links' rates, bytes: at 20 Mbit/s the longer takes a fifth of a second.
SIZES = (131_072, 524_288)
CHECKED = 0.10  # compute alone and beside all others may differ by so much, or nothing is predicted


class LabError(UserError):
    """Failure to say what the lab should."""


@dataclasses.dataclass
class Lab:
    """One run of the lab.

    Attributes:
        out: folder of records, logs and clusters. cache: of compiled programs. data: prefix folder of token files.
        repeats: of every measured time, taken in turn; the first to be cut where time is short.
        budget: seconds for all experiments.
    """

    out: pathlib.Path
    data: str
    repeats: int = 5
    budget: float = 5400.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.cache = self.out / "cache"

    # --- Words and time -----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print progress, with the seconds since the beginning."""
        print(f"{time.monotonic() - self.began:7.0f} s  {text}", flush=True)

    @property
    def left(self) -> float:
        return self.budget - (time.monotonic() - self.began)

    def plan_for(self, rest: float) -> None:
        """Cut the repeats if the rest takes `rest` seconds and the budget has fewer left."""
        if self.left < rest:
            self.repeats = int(np.clip(self.repeats * self.left / rest, 1, self.repeats))
            self.say(f"{rest / 60:.0f} minutes are to come, {self.left / 60:.0f} are left: {self.repeats} repeats")

    def records(self, name: str) -> Records:
        return Records(self.out / f"{name}.jsonl")

    # --- Measuring ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self, scenario: Scenario, name: str) -> Iterator["Bench"]:
        """Yield workers on a cluster with the scenario's links, which are fast before `Bench.shape`."""
        with hosts.Cluster(scenario.rates.tolist(), share=scenario.share, uplinks=scenario.uplinks) as cluster:
            cluster.set_rates(None)
            with Session(cluster, scenario.devices_per_host, self.out / "logs" / name, self.cache) as session:
                self.say(f"{name}: {cluster.hosts} hosts x {scenario.devices_per_host} devices are up")
                session.ask("speed", slowness=scenario.slowness)
                yield Bench(self, scenario, cluster, session)


class Bench:
    """A session on a scenario: compiled programs, limits, and times."""

    def __init__(self, lab: Lab, scenario: Scenario, cluster: hosts.Cluster, session: Session) -> None:
        self.lab, self.scenario, self.cluster, self.session = lab, scenario, cluster, session
        self._compute: tuple[dict[str, Any], ...] | None = None

    def compile(self, splits: list[Split], orders: Sequence[Sequence[int]] = (), **run: Any) -> list[str]:
        """Compile the missing programs, and connect processes that exchange messages; return the programs' names.

        Args:
            orders: of the devices in each mesh, if not as they come; then names end in them.
            run: that section of the configuration; with eval_batches the programs can evaluate.
        """
        orders = orders or [()] * len(splits)
        names = [s.name + (f" on {','.join(map(str, order))}" if order else "") for s, order in zip(splits, orders)]
        tasks = {}
        for name, split, order in zip(names, splits, orders, strict=True):
            tasks[name] = {
                "do": "load",
                "name": name,
                "config": split.values(self.lab.data, **run),
                "order": list(order),
                "evaluates": "eval_batches" in run,
            }
        self.session.ask_staggered(list(tasks.values()), hands_on="keys")
        self.session.ask("warm", names=list(tasks))
        self.lab.say(f"compiled {', '.join(tasks)}")
        return names

    def wires(self, names: Sequence[str]) -> list[dict[str, int]]:
        """Return the bytes that all devices together send in a step of each compiled program, by kind."""
        return self.session.ask_apart([{"do": "wire", "name": name} for name in names])

    def free(self) -> None:
        """Lift the limits of devices and links."""
        self.session.ask("speed", slowness=0)
        self.cluster.set_rates(None)

    def shape(self, links: Scenario | np.ndarray) -> None:
        """Give the links the rates of a scenario, or those of a matrix, Mbit/s [H, H]."""
        if isinstance(links, Scenario):
            self.cluster.set_rates(links.rates.tolist(), links.uplinks)
        else:
            self.cluster.set_rates(links.tolist())

    def check(self, split: Split) -> float:
        """Return the difference of compute alone from compute beside all others (mean over some hosts)."""
        task = {"config": split.values(self.lab.data), "repeats": 3}
        self.session.ask_staggered([{"do": "compute", **task}])
        some = range(0, self.cluster.hosts, max(1, self.cluster.hosts // 3))
        alone = [self.session.ask_one(h, "compute", **task)[0] for h in some]
        beside = [answer[0] for answer in self.session.ask("compute", **task)]
        return statistics.fmean(alone) / statistics.fmean(beside) - 1

    def profile(self, name: str, split: Split) -> Cluster:
        """Return the planner's profile of the cluster as it is now; compute is measured only the first time.

        Raises:
            LabError: compute alone and beside all others differ so much that nothing can be predicted from it.
        """
        if self._compute is None:
            difference = self.check(split)
            self.lab.records("checks").add(name, alone_over_beside=1 + difference)
            self.lab.say(f"compute alone against all hosts at once: {difference:+.1%}")
            if abs(difference) > CHECKED:
                raise LabError(
                    f"compute alone differs by {difference:+.1%} from compute beside all other hosts, more than "
                    f"{CHECKED:.0%}, so nothing is predicted; leave this machine to the lab, or give it more cores"
                )
        path = self.lab.out / "clusters" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        measured = [] if self._compute else [split.micro_batch]
        options = {"sizes": SIZES, "repeats": 2 if measured else 1}
        # Hosts share this machine's cores. With two devices on each, loops of real compute on all of them at once would
        # wait for cores, as a step does not: its hosts take turns, above all on slow links. So one host measures.
        options |= {"micro_batches": measured, "tensor": [split.mesh[2]], "compute_hosts": 1}
        [answer, *_] = self.session.ask(
            "profile",
            config=split.values(self.lab.data),
            options=options,
            name=name,
            path=str(path),
            sites=self.scenario.sites,
        )
        self.lab.say(f"profiled {name} in {answer['seconds']:.0f} s")
        cluster = Cluster.load(path)
        self._compute = self._compute or cluster.compute
        cluster = dataclasses.replace(cluster, compute=self._compute)
        cluster.save(path)
        return cluster

    def time(self, names: list[str], repeats: int, steps: int = 1) -> dict[str, list[float]]:
        """Return seconds per step on the slowest host, for each program and repeat, in turn."""
        answers = self.session.ask("time", names=names, repeats=repeats, steps=steps)
        return {name: np.max([answer[name] for answer in answers], axis=0).tolist() for name in names}


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median and the spread (half the distance between the quartiles) of repeats."""
    low, high = np.quantile(seconds, [0.25, 0.75])
    return {"median": float(np.median(seconds)), "spread": float(high - low) / 2, "repeats": len(seconds)}
