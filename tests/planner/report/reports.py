"""Reports: of a small search, and of plans by hand whose figures are round."""

import dataclasses
import html.parser
import math
import re
from typing import Any

import numpy as np

from paxtrain.config import OuterConfig
from paxtrain.config.axes import more_axes
from paxtrain.study.loss_probe_file import LossProbe, ProbedCodec
from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate
from planner.cost.coded import coded
from planner.cost.link_seconds import fabric
from planner.placement.gain import Gain
from planner.placement.place import Placement
from planner.report import contents
from planner.report.further import FreeChoice, Scaling, Size, WhatIf
from planner.report.losses import Budgeted
from planner.search.baselines import NO_COMPRESSION, Comparison
from planner.search.budget import Budget
from planner.search.nearby import Nearby
from planner.search.search import Options, Outcome, Search
from planner.search.space import COLUMNS, Choices, Space, numbers_of
from planner.search.tried import Found
from tests.compress_settings import compression
from tests.planner.examples import MODEL, cluster


def made_report(
    micro_batches: int = 16, schedule: str = "eager_1f1b", pipe: int = 2, tensor: int = 4, **changes: Any
) -> contents.Report:
    """Return a report on four plans for four hosts of four devices; `changes` replace its attributes.

    A tensor group fills a host, so placements are few.
    """
    some = changes.get("cluster") or cluster(4, 4)
    choices = Choices(
        tensor=(tensor,),
        pipe=(pipe,),
        micro_batch=(1,),
        schedules=(schedule,),
        saves=("dots",),
        data_ranks=(),
        backward=("epilogue",),
        virtual_stages=(2,),
    )
    batch = some.devices // (tensor * pipe) * micro_batches
    search = Search(some, MODEL, batch, choices, Budget(margin=False), Options(top=4, placed=1))
    outcome = search.run()
    chosen = outcome.ranked[0]
    values = {
        "cluster": some,
        "model": MODEL,
        "global_batch": batch,
        "outcome": outcome,
        "chosen": chosen,
        "fabric": search.fabric,
        "comparisons": [
            Comparison("host order", "the same plan on the devices in order", 1.25 * chosen.seconds),
            Comparison("no compression", "another plan", 0.99 * chosen.seconds),
        ],
        "memory": {"weights": np.full(pipe, 8e9), "activations": np.linspace(40e9, 10e9, pipe)},
        "limit": search.limit,
        "memory_source": "closed form",
        "sources": {"links": "made up"},
        "noise": contents.Noise(0.24, 0.01, "over 3 samples of the links"),
        "oracle": (contents.OracleRow("2 x 4 x 2", 7.5e9, 12.5, "XLA for a GPU"),),
        "explained": ("data=4 pipe=2: does not fit, needs 99.0 GB per device",),
        "command": "python -m planner.plan --cluster=a.json",
    }
    return contents.Report(**{**values, **changes})


# --- By hand: steps of 65,536 tokens, of which none takes less than 0.4 s ---------------------------------------------


def plan(seconds: float, gigabytes: float = 40, placed: str = "exact", **changes: Any) -> Found:
    """Return a plan for 64 sequences on 16 devices, two tensor groups a host; `changes` are of its candidate."""
    values = {"data": 4, "pipe": 2, "tensor": 2, "micro_batch": 1, "micro_batches": 16, "schedule": "1f1b"}
    candidate = Candidate(**{**values, "counts": (6, 6), **changes})
    hosts = (np.arange(candidate.groups) * candidate.tensor // 4).reshape(candidate.data, candidate.pipe)
    return Found(0, candidate, Placement(hosts, seconds, 0.4, placed, 1), np.nan, np.nan, gigabytes * 1e9, 0.4)


def space_of(ranked: list[Found]) -> Space:
    """Return the candidates of plans as a space, in their order."""
    numbers = [numbers_of(found.candidate) for found in ranked]
    columns = {name: np.array([row[name] for row in numbers]) for name in COLUMNS}
    others = np.array([found.candidate.others or (1,) * len(more_axes()) for found in ranked])
    slots, together = (np.ones(len(ranked), int) for _ in range(2))
    return Space(**columns, slots=slots, together=together, others=others)


def by_hand(*ranked: Found, chosen: int = 0, some: Cluster | None = None, **changes: Any) -> contents.Report:
    """Return a report on plans for 64 sequences and four hosts of four devices.

    Args:
        ranked: plans, best first.
        chosen: number of the recommended one, from 0 on.
        some: cluster of four hosts; None for one whose links are alike.
        changes: attributes of the report.
    """
    some = some or cluster(4, 4, seed=None)
    every = [dataclasses.replace(found, index=n) for n, found in enumerate(ranked)]
    points = np.array([[found.index, found.seconds, found.memory] for found in every])
    outcome = Outcome(every, 12345, 678, 90, 12, 3.14, space_of(every), points[:, 2], points[:, 1], 0.4, points)
    values = {
        "cluster": some,
        "model": MODEL,
        "global_batch": 64,
        "outcome": outcome,
        "chosen": every[chosen],
        "fabric": fabric(some),
        "comparisons": [
            Comparison("host order", "the same plan on devices in order", 1.25 * ranked[chosen].seconds),
            Comparison(NO_COMPRESSION, "2 x 4 x 2, micro-batch 1, 1f1b, dots", 3.5 * ranked[chosen].seconds),
        ],
        "memory": {"weights": np.full(2, 8e9), "activations": np.array([32e9, 8e9])},
        "limit": 80e9,
        "memory_source": "closed form",
        "sources": {"links": "made up"},
        "explained": ("data=2 pipe=4: does not fit, needs 99.0 GB per device, 19.0 GB too much",),
        "command": "python -m planner.plan --cluster=a.json",
    }
    return contents.Report(**{**values, **changes})


PLANS = [
    plan(0.5),
    plan(0.496, 20, "annealed", backward="epilogue"),
    plan(0.6, 79.9, "layout", tensor=4, pipe=1, counts=(12,), shard="none", sequence_parallel=True, save="residuals"),
    plan(0.8, 8.25, "host order", pipe=4, data=2, schedule="interleaved_1f1b", chunks=2, counts=(1, 2) * 4),
    plan(1.25, data_micro_batches=(20, 20, 12, 12), uneven_data=True, micro_batches=20),
    plan(40.0, backward="all", backward_links=(1, 2), pipe=4, data=2, counts=(3,) * 4, data_rank=128),
]


def asked_for_nothing() -> contents.Report:
    """Return a report on a choice without compression, with offers, plans near by and answers to other questions."""
    sizes = (Size(n, 4 * n, plan(2 / more, 10, data=n), 32768 * more) for n, more in ((1, 1), (2, 1.75), (4, 2.25)))
    near = (plan(0.4, data=2), ("host1", "host3"), 0.25), (plan(0.1, data=3), ("host1",), 4.0), (plan(0.4), (), 0.172)
    return by_hand(
        PLANS[0],
        *PLANS[2:5],
        nearby=tuple(Nearby(found, 64 - 4 * (not without), without, gain) for found, without, gain in near),
        offers=(
            contents.Offer("all", plan(0.49, backward="all")),
            contents.Offer("data", plan(0.25, data_rank=32)),
            contents.Offer("epilogue", plan(0.5, backward="epilogue")),
        ),
        free_choice=FreeChoice(PLANS[0], plan(0.4, save="residuals")),
        scaling=Scaling(tuple(sizes), ((3, "a global batch of 64 cannot be split over 12 devices"),), 2e9, price=3.0),
        outlooks=(
            contents.Outlook(0.45, 0.56, 0.5, 0.0, 0.9996, 0.0),
            contents.Outlook(0.5, 0.75, 0.62, 0.02, 0.51, 0.875),
            contents.Outlook(0.7, 0.9, 0.8, 0.0, 1.0, 0.9995),
            contents.Outlook(0.6, 2.5, 0.55, 0.0, 1.0, 0.9),
        ),
        what_ifs=(WhatIf("network x 8", plan(0.25), 0.475), WhatIf("one host less (host3)", plan(1.5, data=3), None)),
    )


def compressed() -> contents.Report:
    """Return a report on plans of which the third fits once compiled, on hosts of two sites behind trunks."""
    trunks = [{"hosts": ["host0", "host3"], "bandwidth": 1e9}, {"hosts": ["host1"], "bandwidth": 1e6}]
    some, compiler = cluster(4, 4, seed=None, sites=[0, 0, 1, 1], trunks=trunks), "XLA for a GPU"
    sizes = {"4 x 1 x 4, 1f1b, residuals": 81e9, "4 x 2 x 2, 1f1b, dots": 80.5e9, "4 x 2 x 2, 1f1b, dots, epi16": 20e9}
    return by_hand(
        PLANS[2],
        *PLANS[:2],
        PLANS[5],
        chosen=2,
        some=some,
        noise=contents.Noise(0.25, 0.01, Gain(0.25, 0.01, 4, (0.24, 0.02)).words),
        oracle=tuple(contents.OracleRow(name, size, 2.5, compiler) for name, size in sizes.items()),
        memory_source=compiler,
    )


def within_a_budget() -> contents.Report:
    """Return a report on codecs within a budget of loss, for data ranks that differ, on hosts with rails."""
    c = coded(compression(forward_codec="int8", forward_messages="all", weights_codec="int8"))
    codecs = (ProbedCodec("backward", "lowrank", (0.03, 0.034), 16), ProbedCodec("forward", "int8", (0.001, 0.003)))
    probe = LossProbe(dataclasses.asdict(MODEL) | {"layers": 4}, (2, 2), 2, 50, 1024, (0, 1), (3.0, 3.1), codecs)
    uneven = {"data_micro_batches": (20, 20, 12, 12), "micro_batches": 20}
    return by_hand(
        plan(2.0, backward="all", coded=c, **uneven),
        some=cluster(4, 4, seed=None, nics=2, rails={"pxn": False}),
        noise=contents.Noise(21.06, 0.03, Gain(21.06, 0.03, 4, (math.nan, math.nan)).words),
        budgeted=Budgeted(probe, "probe.json", 0.04, codecs),
    )


def apart() -> contents.Report:
    """Return a report on groups that train apart, on hosts whose flows change rails inside them."""
    some, noise = cluster(4, 4, seed=None, nics=2, rails=True), Gain(0.01, 0.008, 4, (0.002, 0.003))
    outer = OuterConfig(every=20, groups=2)
    return by_hand(plan(0.5, outer=outer), some=some, noise=contents.Noise(noise.mean, noise.std, noise.words))


BY_HAND = (asked_for_nothing, compressed, within_a_budget, apart)


# --- Pages ------------------------------------------------------------------------------------------------------------


class Balanced(html.parser.HTMLParser):
    """A parser that records wrongly nested tags and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.wrong, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data") or name.startswith("on"):
                self.fetched.append((name, value))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def checked(text: str) -> str:
    """Return a page without its scripts after a check that its tags nest and that it fetches nothing."""
    parser = Balanced()
    parser.feed(text)
    assert not parser.open and not parser.wrong and not parser.fetched
    text = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<script|@import|url\(|https?://|\bnan\b|\binf\b", text, re.IGNORECASE)
    return text


def plain(text: str) -> str:
    """Return the words of a page, a line each."""
    text = re.sub(r"<style>.*?</style>|<title>[^<]*</title>|<span class=.bar.*?</span>", "", text, flags=re.DOTALL)
    text = re.sub(r"</?(?:td|th|b|dt|span)\b[^>]*>", " ", text)
    return "\n".join(filter(None, (html.unescape(line).strip() for line in re.split(r"<[^>]*>|\n", text))))
