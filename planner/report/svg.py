"""SVG drawings as text: shapes, ticks and rasters. They need no library and are sharp on screen and paper."""

import base64
import html
import math
import struct
import zlib

import numpy as np

INK, SOFT, GRID = "#22272e", "#5c6670", "#e3e7ea"
HALO = {"paint_order": "stroke", "stroke": "#ffffff", "stroke_width": "3"}  # a white outline for words that cross lines


class Svg:
    """A drawing of width x height pixels, with x to the right and y down."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self._label = width, height, label
        self._parts: list[str] = []

    def _add(self, tag: str, inner: str = "", title: str = "", **attributes: str | float) -> None:
        """Add an element; underscores in attribute names become hyphens, and numbers are rounded to a tenth."""
        words = [f'{name.rstrip("_").replace("_", "-")}="{_value(x)}"' for name, x in attributes.items()]
        inner = (f"<title>{html.escape(title)}</title>" if title else "") + inner
        self._parts.append(f"<{' '.join([tag, *words])}>{inner}</{tag}>")

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, title: str = "", **attributes: str | float
    ) -> None:
        """Add a rectangle.

        Args:
            x: pixels from the left.
            y: pixels from the top.
            width: pixels.
            height: pixels.
            fill: color.
            title: words that a pointer over the rectangle shows.
            attributes: further attributes of the element; underscores become hyphens.
        """
        self._add("rect", "", title, x=x, y=y, width=width, height=height, fill=fill, **attributes)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = SOFT, **attributes: str | float) -> None:
        """Add a straight line.

        Args:
            x1: x of the first end in pixels.
            y1: y of the first end in pixels.
            x2: x of the second end in pixels.
            y2: y of the second end in pixels.
            stroke: color.
            attributes: further attributes of the element; underscores become hyphens.
        """
        self._add("line", "", "", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **attributes)

    def path(self, d: str, **attributes: str | float) -> None:
        """Add the shape that SVG path commands describe, unless they are empty."""
        if d:
            self._add("path", "", "", d=d, **attributes)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 12,
        anchor: str = "start",
        fill: str = SOFT,
        **attributes: str | float,
    ) -> None:
        """Add words.

        Args:
            x: x of the anchor in pixels.
            y: y of the baseline in pixels.
            words: text.
            size: font size in pixels.
            anchor: part of the words that is at x: "start", "middle" or "end".
            fill: color.
            attributes: further attributes of the element; underscores become hyphens.
        """
        self._add("text", html.escape(words), "", x=x, y=y, font_size=size, text_anchor=anchor, fill=fill, **attributes)

    def shapes(self, filled: list[tuple[str, str]]) -> None:
        """Add filled shapes, each a color and path commands."""
        for color, d in filled:
            self.path(d, fill=color)

    def image(self, x: float, y: float, width: float, height: float, png: bytes) -> None:
        """Add a raster whose pixels become sharp cells.

        Args:
            x: pixels from the left.
            y: pixels from the top.
            width: pixels.
            height: pixels.
            png: the raster, as `png` encodes it.
        """
        data = "data:image/png;base64," + base64.b64encode(png).decode()
        style = "image-rendering:pixelated"
        self._add("image", x=x, y=y, width=width, height=height, href=data, preserveAspectRatio="none", style=style)

    def legend(self, x: float, y: float, items: list[tuple[str, str]], size: float = 12) -> float:
        """Add swatches with words, and return the x of their end.

        Args:
            x: x of the first swatch in pixels.
            y: y of the words' baseline in pixels.
            items: color and words of each swatch.
            size: font size in pixels.
        """
        for color, words in items:
            self.rect(x, y - 9, 11, 11, color, rx=2)
            self.text(x + 16, y, words, size)
            x += 16 + width_of(words, size) + 18
        return x

    def __str__(self) -> str:
        body = "".join(self._parts)
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return f'<svg {size} role="img" aria-label="{html.escape(self._label)}">{body}</svg>'


def _value(x: str | float) -> str:
    if isinstance(x, str):
        return html.escape(x)
    return f"{round(float(x), 1):g}" if abs(x) < 1e5 else f"{x:.0f}"


def width_of(words: str, size: float) -> float:
    """Estimate the width in pixels of words in a sans-serif font; it is more often too large than too small."""
    return sum(0.37 if c in "iljtfr.,:;|'()[] -" else 0.95 if c in "mwMW%" else 0.63 for c in words) * size


def box(x: float, y: float, width: float, height: float) -> str:
    """Return path commands of a rectangle, so that thousands of one color can be one element.

    Args:
        x: pixels from the left.
        y: pixels from the top.
        width: pixels.
        height: pixels.
    """
    return f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


# --- Scales -----------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers for an axis, which are 1, 2 or 5 times a power of ten apart.

    Args:
        low: least number allowed.
        high: largest number allowed.
        count: about how many numbers to return.
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= raw * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def unit(seconds: float) -> tuple[float, str]:
    """Return the factor and the name of the unit in which a number of seconds reads well."""
    return next(((f, name) for f, name in ((1.0, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "µs"))


def duration(seconds: float) -> str:
    """Return seconds as words with four digits: "1.866 s", "12.4 ms"."""
    factor, name = unit(seconds)
    return f"{seconds * factor:.4g} {name}" if seconds else "0"


# --- Rasters ----------------------------------------------------------------------------------------------------------


def ramp(colors: list[str], steps: int) -> np.ndarray:
    """Return a palette [steps, 3] uint8 that runs evenly through colors "#rrggbb"."""
    known = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors], float)
    at = np.linspace(0, len(colors) - 1, steps)
    return np.stack([np.interp(at, np.arange(len(colors)), known[:, i]) for i in range(3)], 1).round().astype(np.uint8)


def png(indices: np.ndarray, palette: np.ndarray) -> bytes:
    """Encode palette indices, uint8 [rows, columns], with a palette, uint8 [n, 3], as PNG.

    References:
        W3C, Portable Network Graphics Specification, color type 3.
    """
    rows, columns = indices.shape

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), indices.astype(np.uint8)], axis=1)  # filter 0: none
    parts = [
        (b"IHDR", header),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
