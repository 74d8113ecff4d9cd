"""The picture of rate against goodput."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

SIZE = (1200, 760)
LEFT, TOP, RIGHT, BOTTOM = 100, 120, 40, 90  # margins
SCALE = 2  # lines are drawn larger, so that they are smooth
COLORS = ((33, 102, 172), (214, 96, 77))
TEXT, FAINT, GRID = (40, 40, 40), (120, 120, 120), (226, 226, 226)
NUM_TICKS = 8


class Measured(NamedTuple):
    """The goodput at a rate: the median over runs, and their range."""

    rate: float
    median: float
    low: float
    high: float


class Axes(NamedTuple):
    """Maps values to pixels of the picture; both axes start at 0."""

    x_max: float
    y_max: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM
        return LEFT + width * x / self.x_max, TOP + height * (1.0 - y / self.y_max)


def make_axes(curves: Mapping[str, Sequence[Measured]]) -> Axes:
    """Axes with room for every rate; goodput has the same scale as rate, as it is no higher unless answers are late."""
    points = [point for curve in curves.values() for point in curve]
    top = max(max(point.rate, point.high) for point in points) * 1.05
    return Axes(max(point.rate for point in points) * 1.05, top)


def ticks(largest: float) -> list[float]:
    """Round values from 0, about ``NUM_TICKS``."""
    rough = largest / NUM_TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [index * step for index in range(int(largest / step + 1e-9) + 1)]


def draw(title: str, targets: str, curves: Mapping[str, Sequence[Measured]], path: Path) -> None:
    """Write a PNG: a curve for each server with the range of its runs, and the line on which every request is good.

    Args:
        targets: what a good request meets.
        curves: name of a server -> its goodput by rate.
    """
    axes = make_axes(curves)
    image = Image.new("RGB", (SIZE[0] * SCALE, SIZE[1] * SCALE), "white")
    canvas = _Canvas(ImageDraw.Draw(image))
    _draw_grid(canvas, axes)
    end = min(axes.x_max, axes.y_max)
    canvas.dashed(axes.place(0, 0), axes.place(end, end))
    for color, points in zip(COLORS, curves.values(), strict=False):
        ordered = sorted(points)
        canvas.line([axes.place(point.rate, point.median) for point in ordered], color, 3)
        for point in ordered:
            canvas.range(axes.place(point.rate, point.low), axes.place(point.rate, point.high), color)
            canvas.dot(axes.place(point.rate, point.median), color)
    canvas.text((LEFT, 18), title, 26)
    canvas.text((LEFT, 54), f"good: {targets}", 18, FAINT)
    x = float(LEFT)
    for color, name in zip(COLORS, curves, strict=False):
        canvas.dot((x + 6, 98), color)
        x += 20 + canvas.text((x + 20, 98), name, 18, anchor="lm") + 30
    canvas.dashed((x, 98), (x + 36, 98))
    canvas.text((x + 44, 98), "every request good", 18, anchor="lm")
    _write_upwards(image, (14, TOP + (SIZE[1] - TOP - BOTTOM) // 2), "goodput, requests/s")
    image.resize(SIZE, Image.Resampling.LANCZOS).save(path, format="PNG")


def _draw_grid(canvas: _Canvas, axes: Axes) -> None:
    for value in ticks(axes.x_max):
        x, y = axes.place(value, 0)
        canvas.line([(x, y), (x, TOP)], GRID, 1)
        canvas.text((x, y + 10), f"{value:g}", 18, FAINT, "mt")
    for value in ticks(axes.y_max):
        x, y = axes.place(0, value)
        canvas.line([(x, y), (SIZE[0] - RIGHT, y)], GRID, 1)
        canvas.text((x - 10, y), f"{value:g}", 18, FAINT, "rm")
    canvas.text(((LEFT + SIZE[0] - RIGHT) / 2, SIZE[1] - 34), "offered rate, requests/s", 20, TEXT, "mm")


def _write_upwards(image: Image.Image, left_middle: tuple[int, int], text: str) -> None:
    """Write a text that is read from the right."""
    font = ImageFont.load_default(20 * SCALE)
    width, height = int(font.getlength(text)) + 1, 28 * SCALE
    label = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(label).text((0, 0), text, fill=TEXT, font=font)
    image.paste(label.rotate(90, expand=True), (left_middle[0] * SCALE, left_middle[1] * SCALE - width // 2))


class _Canvas:
    """Draws at ``SCALE`` what is given in pixels of the picture."""

    def __init__(self, draw: ImageDraw.ImageDraw) -> None:
        self._draw = draw

    def line(self, points: Sequence[tuple[float, float]], color: tuple[int, int, int], width: int) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self._draw.line(scaled, fill=color, width=width * SCALE, joint="curve")

    def dashed(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        length, dash = math.dist(start, end), 12.0
        for index in range(0, int(length / dash), 2):
            parts = [min((index + offset) * dash / length, 1.0) for offset in (0, 1)]
            ends = [tuple(a + (b - a) * part for a, b in zip(start, end, strict=True)) for part in parts]
            self.line([(one[0], one[1]) for one in ends], FAINT, 2)

    def range(self, low: tuple[float, float], high: tuple[float, float], color: tuple[int, int, int]) -> None:
        self.line([low, high], color, 2)
        for x, y in (low, high):
            self.line([(x - 7, y), (x + 7, y)], color, 2)

    def dot(self, center: tuple[float, float], color: tuple[int, int, int]) -> None:
        x, y = (value * SCALE for value in center)
        radius = 6 * SCALE
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)

    def text(
        self,
        at: tuple[float, float],
        text: str,
        size: int,
        color: tuple[int, int, int] = TEXT,
        anchor: str | None = None,
    ) -> float:
        """Write text, and return its width."""
        font = ImageFont.load_default(size * SCALE)
        self._draw.text((at[0] * SCALE, at[1] * SCALE), text, fill=color, font=font, anchor=anchor)
        return float(self._draw.textlength(text, font=font)) / SCALE
