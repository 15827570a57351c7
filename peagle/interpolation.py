"""Read a value off measured points: linear interpolation, and careful extrapolation."""

from collections.abc import Mapping


def interpolate(points: Mapping[int, float], x: int) -> float:
    """The value at x on the line through its neighbors; beyond the outermost points, their value.

    >>> interpolate({1: 2.0, 3: 4.0}, 2), interpolate({1: 2.0, 3: 4.0}, 9)
    (3.0, 4.0)
    """
    return fit_line(points, min(max(x, min(points)), max(points)))


def fit_line(points: Mapping[int, float], x: int) -> float:
    """The value at x on the line through the two nearest points, on both sides of x if possible.

    Made for costs: beyond the outermost points the value never falls as x grows, and never falls
    below half of the nearest point's value. Needs two points, or one at x itself.

    >>> fit_line({0: 1.0, 4: 3.0}, 2), fit_line({0: 1.0, 4: 3.0}, 6), fit_line({0: 3.0, 4: 1.0}, 6)
    (2.0, 4.0, 1.0)
    """
    if x in points:
        return points[x]
    below = sorted(p for p in points if p < x)
    above = sorted(p for p in points if p > x)
    left, right = (below[-1], above[0]) if below and above else (below[-2:] or above[:2])
    slope = (points[right] - points[left]) / (right - left)
    if below and above:
        return points[left] + slope * (x - left)
    near = right if below else left
    return max(points[near] + max(slope, 0.0) * (x - near), points[near] / 2)
