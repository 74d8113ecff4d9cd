"""The picture of rate against goodput."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vllm_omni.entrypoints.bench.plot import COLORS, SIZE, Axes, Measured, draw, make_axes, ticks

A = [Measured(4.0, 3.0, 2.5, 3.5), Measured(1.0, 1.0, 1.0, 1.0)]
B = [Measured(1.0, 0.5, 0.5, 0.5), Measured(4.0, 1.0, 1.0, 1.0)]


def test_the_curves_pass_through_their_points(tmp_path: Path) -> None:
    curves = {"A: http://a": A, "B: http://b": B}
    draw("omni-speech", "ttfa <= 500 ms", curves, tmp_path / "plot.png")
    axes = make_axes(curves)
    with Image.open(tmp_path / "plot.png") as image:
        assert (image.format, image.size) == ("PNG", SIZE)
        for color, points in zip(COLORS, curves.values(), strict=True):
            for point in points:
                x, y = axes.place(point.rate, point.median)
                assert image.getpixel((round(x), round(y))) == color
        assert is_near(image, axes.place(4.0, 2.5))  # the lower end of A's runs
        assert is_near(image, axes.place(2.5, 2.0))  # half way between A's two points
        assert not is_near(image, axes.place(2.5, 3.5))


def is_near(image: Image.Image, place: tuple[float, float]) -> bool:
    """Whether the color of the first curve is here, or two pixels from here; thin lines are smoothed."""
    x, y = map(round, place)
    area = np.asarray(image.convert("RGB"), dtype=int)[y - 2 : y + 3, x - 2 : x + 3]
    return bool((abs(area - COLORS[0]).max(axis=2) < 30).any())


def test_axes_start_at_zero_and_have_room_for_all() -> None:
    axes = make_axes({"a": [Measured(4.0, 3.0, 2.5, 5.0)]})
    assert axes.x_max > 4.0 and axes.y_max > 5.0
    left, bottom = Axes(2.0, 2.0).place(0.0, 0.0)
    right, top = Axes(2.0, 2.0).place(2.0, 2.0)
    assert 0 < left < right < SIZE[0] and SIZE[1] > bottom > top > 0


@pytest.mark.parametrize(("largest", "found"), [(12.6, [0, 2, 4, 6, 8, 10, 12]), (0.9, [0, 0.2, 0.4, 0.6, 0.8])])
def test_ticks_are_round(largest: float, found: list[float]) -> None:
    assert ticks(largest) == pytest.approx(found)


def test_one_point_without_goodput_can_be_drawn(tmp_path: Path) -> None:
    draw("omni-images", "e2el <= 1 ms", {"http://a": [Measured(2.0, 0.0, 0.0, 0.0)]}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
