"""One cluster from its links to a trained model: profile it, plan for it, train under several plans, compare them."""

import numpy as np

from experiments.hosts.scenario import Scenario
from experiments.lab.laboratory import Lab
from experiments.lab.measuring import joint
from paxtrain import tables
from planner.planning.to_plan import device_order


def run(lab: Lab, scene: Scenario, steps: int) -> None:
    """Train under each way to choose a plan, and print the times and losses."""
    with lab.session(scene, scene.name) as bench:
        bench.shape(scene)
        base = joint.base(scene.hosts, scene.devices_per_host)
        cluster = bench.profile(f"{scene.name} demonstration", base)
        chosen = joint.choices(base, cluster, lab.seed)
        orders = [device_order(hosts, cluster.devices_per_host, split.mesh[2]) for split, hosts, _ in chosen.values()]
        bench.free()
        names = bench.compile([split for split, _, _ in chosen.values()], orders, eval_batches=4)
        bench.session.ask("speed", slowness=scene.slowness)
        bench.shape(scene)
        rows = []
        for name, (what, (_, _, predicted)) in zip(names, chosen.items(), strict=True):
            seconds = bench.time([name], min(lab.repeats, steps))[name]
            found = bench.session.ask("train", name=name, steps=steps, eval_every=steps)[0]
            losses = found["losses"]
            rows.append(
                (
                    what,
                    f"{np.median(seconds):.3f} s a step, predicted {predicted:.3f} s, loss {losses[0]:.3f} to "
                    f"{losses[-1]:.3f} in {steps} steps",
                )
            )
        lab.say(f"{scene.name}: {scene.what}")
        print(tables.table(rows), flush=True)
