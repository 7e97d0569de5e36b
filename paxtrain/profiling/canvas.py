"""An empty figure, drawn without a display or pyplot's global state, and the style of all figures."""

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given width and height in inches."""
    made = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(made)
    return made


def style(axes: Axes) -> None:
    """Reduce axes to two spines, and draw a light grid behind everything."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e6e8ea", linewidth=0.8)
    axes.set_axisbelow(True)
