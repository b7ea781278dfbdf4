"""Learning curves as a PNG: a thin line a seed, a thick one for the mean of each arm.

In: values in [0, 1] by arm, seed and iteration. Out: a picture. Pillow comes with tensorboard.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT = 700, 305
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 34
SCALE = 3  # drawn larger and scaled down, so that lines are smooth
COLORS = ((31, 99, 177), (214, 96, 20), (40, 140, 70), (130, 60, 150))
INK, GRID = (60, 60, 60), (225, 225, 225)


def draw(path: Path, arms: Mapping[str, Sequence[Sequence[float]]], label: str) -> None:
    """Write the picture; `label` names the vertical axis."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=12 * SCALE)
    longest = max(len(curve) for curves in arms.values() for curve in curves)

    def point(iteration: int, value: float) -> tuple[float, float]:
        across = (WIDTH - LEFT - RIGHT) * (iteration / max(longest - 1, 1))
        return (LEFT + across) * SCALE, (TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)) * SCALE

    for tenth in range(0, 11, 2):
        value = tenth / 10
        pen.line([point(0, value), point(longest - 1, value)], GRID, SCALE)
        x, y = point(0, value)
        pen.text((x - 6 * SCALE, y), f"{value:.1f}", INK, font, anchor="rm")
    step = max(1, -(-longest // 12))
    for iteration in range(0, longest, step):
        x, y = point(iteration, 0)
        pen.text((x, y + 6 * SCALE), str(iteration), INK, font, anchor="mt")
    pen.text((LEFT * SCALE, 8 * SCALE), f"{label} by iteration", INK, font, anchor="lt")
    across = WIDTH - RIGHT
    for color, (name, curves) in reversed(list(zip(COLORS, arms.items(), strict=False))):
        pale = tuple(channel + (255 - channel) * 6 // 10 for channel in color)
        for curve in curves:
            pen.line([point(i, value) for i, value in enumerate(curve)], pale, SCALE, joint="curve")
        common = min(len(curve) for curve in curves)
        mean = [statistics.fmean(curve[i] for curve in curves) for i in range(common)]
        pen.line([point(i, value) for i, value in enumerate(mean)], color, 3 * SCALE, joint="curve")
        pen.text((across * SCALE, 8 * SCALE), name, color, font, anchor="rt")
        across -= int(pen.textlength(name, font) / SCALE) + 16
    image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(path, optimize=True)
