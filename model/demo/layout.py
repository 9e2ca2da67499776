"""Layout by rejection: nothing touches unless it is meant to, and what must be put in order is clearly apart."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np

from model.demo.compose import Plan
from model.demo.draw import Drawable, Lettering
from model.demo.scene import Box, Relation, order_key, view_scale

Corner = tuple[int, int]
GROUP_MARGIN = 0.09  # between the keys of kinds that a description names one after the other
THING_MARGIN = 0.035  # between the keys of things whose boxes are listed one after the other
MOST_LISTED = 6


def place(
    rng: random.Random,
    plan: Plan,
    drawables: list[Drawable],
    letterings: list[Lettering],
    size: tuple[int, int],
) -> tuple[list[Corner], list[Corner]] | None:
    """Upper left corners of things and texts, or None when a few attempts find none."""
    gap = max(2, round(5 / view_scale(size)))
    for _ in range(6):
        taken: list[Box] = []
        text_corners: list[Corner] = []
        for lettering in letterings:
            corner = _free(rng, lettering.mask.size, taken, size, gap)
            if corner is None:
                break
            text_corners.append(corner)
            taken.append((*corner, corner[0] + lettering.mask.width, corner[1] + lettering.mask.height))
        middles = [(box[1] + box[3]) / 2 / size[1] for box in taken]
        if len(text_corners) < len(letterings) or (len(middles) == 2 and middles[1] - middles[0] < 0.08):
            continue
        corners = _place_things(rng, plan, [drawable.mask.size for drawable in drawables], taken, size, gap)
        if corners is not None and _clear(plan, corners, drawables, size):
            return corners, text_corners
    return None


def _place_things(
    rng: random.Random, plan: Plan, extents: list[tuple[int, int]], taken: list[Box], size: tuple[int, int], gap: int
) -> list[Corner] | None:
    if plan.relation in ("row", "column"):
        return _line(rng, plan.relation, extents, taken, size, gap)
    if plan.relation in ("front", "inside"):
        return _stack(rng, plan.relation, extents, taken, size, gap)
    taken = list(taken)
    corners = []
    for extent in extents:
        corner = _free(rng, extent, taken, size, gap)
        if corner is None:
            return None
        corners.append(corner)
        taken.append((*corner, corner[0] + extent[0], corner[1] + extent[1]))
    return corners


def _line(
    rng: random.Random,
    relation: Relation,
    extents: list[tuple[int, int]],
    taken: list[Box],
    size: tuple[int, int],
    gap: int,
) -> list[Corner] | None:
    """Things side by side, or one below the other, with about equal gaps."""
    along, across = (0, 1) if relation == "row" else (1, 0)
    room = size[along] - sum(extent[along] for extent in extents)
    spaces = len(extents) + 1
    widest = max(extent[across] for extent in extents)
    if room < spaces * 2 * gap or widest + 2 * gap > size[across]:
        return None
    space = room / spaces * rng.uniform(0.55, 1.0)
    position = rng.uniform(gap, room - (spaces - 2) * space - gap) if spaces > 2 else gap
    middle = rng.uniform(widest / 2 + gap, size[across] - widest / 2 - gap)
    corners = []
    for extent in extents:
        drift = rng.uniform(-0.02, 0.02) * size[across]
        other = min(max(middle - extent[across] / 2 + drift, gap), size[across] - extent[across] - gap)
        corner = (round(position), round(other)) if along == 0 else (round(other), round(position))
        if _hits((*corner, corner[0] + extent[0], corner[1] + extent[1]), taken, gap):
            return None
        corners.append(corner)
        position += extent[along] + space
    return corners


def _stack(
    rng: random.Random,
    relation: Relation,
    extents: list[tuple[int, int]],
    taken: list[Box],
    size: tuple[int, int],
    gap: int,
) -> list[Corner] | None:
    """The first thing over a part of the second, or well within it."""
    back = _free(rng, extents[1], taken, size, gap)
    if back is None:
        return None
    middle = (back[0] + extents[1][0] / 2, back[1] + extents[1][1] / 2)
    if relation == "inside":
        reach = [0.08 * extent for extent in extents[1]]
        shift = (rng.uniform(-reach[0], reach[0]), rng.uniform(-reach[1], reach[1]))
    else:
        angle = rng.uniform(0, 2 * np.pi)
        away = rng.uniform(0.55, 0.85)
        shift = (
            away * float(np.cos(angle)) * (extents[0][0] + extents[1][0]) / 2,
            away * float(np.sin(angle)) * (extents[0][1] + extents[1][1]) / 2,
        )
    front = (round(middle[0] + shift[0] - extents[0][0] / 2), round(middle[1] + shift[1] - extents[0][1] / 2))
    box = (*front, front[0] + extents[0][0], front[1] + extents[0][1])
    inside = box[0] >= gap and box[1] >= gap and box[2] <= size[0] - gap and box[3] <= size[1] - gap
    return [front, back] if inside and not _hits(box, taken, gap) else None


def _free(
    rng: random.Random, extent: tuple[int, int], taken: list[Box], size: tuple[int, int], gap: int
) -> Corner | None:
    """A corner at which the thing touches nothing."""
    room = (size[0] - extent[0] - gap, size[1] - extent[1] - gap)
    if room[0] < gap or room[1] < gap:
        return None
    for _ in range(30):
        corner = (rng.randint(gap, room[0]), rng.randint(gap, room[1]))
        if not _hits((*corner, corner[0] + extent[0], corner[1] + extent[1]), taken, gap):
            return corner
    return None


def _hits(box: Box, taken: list[Box], gap: int) -> bool:
    return any(
        box[0] < other[2] + gap and other[0] < box[2] + gap and box[1] < other[3] + gap and other[1] < box[3] + gap
        for other in taken
    )


def _clear(plan: Plan, corners: list[Corner], drawables: list[Drawable], size: tuple[int, int]) -> bool:
    """Whether what a description must put in order is apart by a margin, and the plan's relation is plain to see."""
    boxes = [
        (x, y, x + drawable.mask.width, y + drawable.mask.height)
        for (x, y), drawable in zip(corners, drawables, strict=True)
    ]
    if plan.relation in ("beside", "above"):
        (ax, ay), (bx, by) = (((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in boxes)
        dx, dy = bx - ax, by - ay
        if plan.relation == "beside":
            return dx > 1.6 * abs(dy) and dx > 0.06 * size[0]
        return dy > 1.6 * abs(dx) and dy > 0.06 * size[1]
    if plan.relation in ("front", "inside"):
        return True
    keys = [order_key(box, size) for box in boxes]
    leaders: dict[tuple[str, str | None], float] = {}
    for wish, key in zip(plan.wishes, keys, strict=True):
        group = (wish.noun, wish.colour)
        leaders[group] = min(key, leaders.get(group, key))
    order = list(leaders.values())
    if any(later - earlier < GROUP_MARGIN for earlier, later in pairwise(order)):
        return False
    if len(keys) > MOST_LISTED:
        return True
    return all(later - earlier > THING_MARGIN for earlier, later in pairwise(sorted(keys)))
