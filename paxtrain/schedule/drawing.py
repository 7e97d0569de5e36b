"""A schedule's table as a Gantt chart."""

from matplotlib.figure import Figure

from paxtrain.schedule.table import Schedule

# Forward, backward and the weights' part of a split backward; also by their letters, for readers who see no colours.
_COLORS = {"forward": "#4C78A8", "backward": "#F2B134", "weights": "#72B7B2"}
_NAMES = {"forward": "F", "backward": "B", "weights": "W"}


def draw_schedule(table: Schedule) -> Figure:
    """Draw a schedule: a line for each stage, a column for each row, a box for each op with its micro-batch.

    A row in which a stage does F and B shows F above B. Chunks after the first are darker.

    Args:
        table: schedule, see `schedule_table`.

    Returns:
        A new figure, made without pyplot's global state; `figure.savefig(path)` writes it.
    """
    figure = Figure(figsize=(min(24.0, 2 + 0.32 * table.rows), 1.2 + 0.5 * table.stages), layout="constrained")
    axes = figure.add_subplot()
    phases = ("forward", "backward", "weights") if table.splits else ("forward", "backward")
    together = any(
        ((table.forward[row] >= 0) & (getattr(table, phase)[row] >= 0)).any()
        for row in range(table.rows)
        for phase in phases[1:]
    )
    height = 0.9 / len(phases) if together else 0.9
    for i, phase in enumerate(phases):
        top = height * i if together else 0.0
        for row, stage, micro_batch, chunk in table.ops(phase):
            alpha = 0.55 + 0.45 * (chunk + 1) / table.chunks
            axes.broken_barh([(row, 0.95)], (stage + top, height), color=_COLORS[phase], alpha=alpha)
            if table.rows <= 80:
                text = f"{_NAMES[phase]}{micro_batch}"
                axes.text(row + 0.47, stage + top + height / 2, text, ha="center", va="center", fontsize=6)
    axes.set_xlim(0, table.rows)
    axes.set_ylim(table.stages, -0.1)
    axes.set_yticks([stage + 0.45 for stage in range(table.stages)], [f"stage {s}" for s in range(table.stages)])
    axes.set_xlabel("row")
    chunks = f", {table.chunks} chunks a stage" if table.chunks > 1 else ""
    axes.set_title(f"{table.name}: {table.micro_batches} micro-batches on {table.stages} stages{chunks}", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
