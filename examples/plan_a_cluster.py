# %% [markdown]
# # Plan a cluster, and look at the plan
#
# The cluster has sixteen hosts of eight A100s, with links whose differences were measured. The planner ranks meshes and
# schedules by the simulated step time, and places the best plan on the hosts.

# %%
import pathlib

import matplotlib.figure
import numpy as np

import paxtrain
import planner

cluster = planner.Cluster.load("a100_16x8_measured")
config = paxtrain.load_config("gpt_8b")
options = planner.PlanOptions(top=5, placed=1, tensor=(2, 4), saves=("residuals", "dots"), oracle="no")
found = planner.plan(config, cluster, options)
print(found.text())

# %% [markdown]
# ## The links between hosts
#
# According to the data sheet, all of them have 25 GB/s.

# %%
bandwidth = cluster.bandwidth / 1e9
figure = matplotlib.figure.Figure(figsize=(5, 4), layout="constrained")
axes = figure.add_subplot()
image = axes.imshow(np.where(np.eye(len(bandwidth), dtype=bool), np.nan, bandwidth))
axes.set(title="bandwidth between hosts", xlabel="to", ylabel="from")
figure.colorbar(image, label="GB/s")
pathlib.Path("runs").mkdir(exist_ok=True)
figure.savefig("runs/links.png")

# %% [markdown]
# ## Time against memory of the ranked plans

# %%
for ranked in found.ranked:
    c = ranked.candidate
    name = f"{c.data}x{c.pipe}x{c.tensor} {c.schedule} {c.save}"
    seconds, in_order = ranked.seconds, ranked.host_order_seconds
    print(f"{name:<32}{seconds:7.3f} s, {in_order:.3f} s in host order, {ranked.memory_bytes / 1e9:.1f} GB")
assert (found.step_seconds <= [ranked.host_order_seconds for ranked in found.ranked]).all()

# %% [markdown]
# ## The schedule of the recommended plan

# %%
best = found.ranked[0].candidate
table = paxtrain.schedule_table(best.schedule, best.pipe, micro_batches=8, chunks=best.chunks)
paxtrain.draw_schedule(table).savefig("runs/schedule.png")
