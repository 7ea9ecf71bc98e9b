"""Packing documents of known length into rows of equal capacity.

LPT ("longest processing time first", Graham 1969: the longest document left goes into the emptiest row) balances rows
and is taken wherever it comes out with as few rows as the others. Best fit (into the fullest row that still has room)
bounds their number; where documents are so long that a row holds few of them, rows are also filled one by one with
what leaves the least slack (Gupta and Ho 1999). Deterministic: ties go to the lower index.
"""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Sequence

__all__ = ["fill", "pack", "shuffle_bins"]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute documents over as few rows as the heuristics find.

    Args:
        lengths: tokens of each document, at least 1. One longer than *capacity* counts as *capacity* and gets a row
            of its own: whoever assembles the row cuts it at the tail.
        capacity: tokens of a row.

    Returns:
        For each row the indices of its documents. Every document occurs exactly once; no row is empty.

    Raises:
        ValueError: a length or the capacity is below 1.
    """
    if capacity < 1 or any(length < 1 for length in lengths):
        raise ValueError("lengths and capacity must be at least 1")
    clipped = [min(length, capacity) for length in lengths]
    order = sorted(range(len(clipped)), key=lambda index: (-clipped[index], index))
    total = sum(clipped)
    fewest = -(-total // capacity)
    packed = _best_fit(clipped, order, capacity)
    few_in_a_row = len(clipped) <= 16 * len(packed)
    if few_in_a_row and len(packed) > fewest and total < 0.99 * len(packed) * capacity:
        packed = min(packed, _least_slack(clipped, order, capacity), key=len)
    for rows in range(fewest, min(len(packed), fewest + 3) + 1):
        balanced = _longest_first(clipped, order, capacity, rows)
        if balanced is not None:
            return balanced
    return packed


def _longest_first(lengths: Sequence[int], order: Sequence[int], capacity: int, rows: int) -> list[list[int]] | None:
    """LPT into exactly *rows* rows, or None: what does not fit the emptiest row fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(rows)]
    loads = [(0, row) for row in range(rows)]
    for index in order:
        load, row = loads[0]
        if load + lengths[index] > capacity:
            return None
        bins[row].append(index)
        heapq.heapreplace(loads, (load + lengths[index], row))
    return [each for each in bins if each]


def _best_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, row), ascending
    for index in order:
        place = bisect.bisect_left(rooms, (lengths[index], -1))
        if place == len(rooms):
            bins.append([index])
            bisect.insort(rooms, (capacity - lengths[index], len(bins) - 1))
        else:
            room, row = rooms.pop(place)
            bins[row].append(index)
            bisect.insort(rooms, (room - lengths[index], row))
    return bins


def _least_slack(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill row after row: the longest document left, then the set of others that leaves the least room."""
    waiting: dict[int, list[int]] = {}
    for index in reversed(order):
        waiting.setdefault(lengths[index], []).append(index)
    sizes = sorted(waiting)
    bins: list[list[int]] = []
    while sizes:
        taken = [sizes[-1], *_closest_sum(waiting, sizes, capacity)]
        bins.append([waiting[size].pop() for size in taken])
        sizes = [size for size in sizes if waiting[size]] if any(not waiting[size] for size in taken) else sizes
    return bins


def _closest_sum(waiting: dict[int, list[int]], sizes: Sequence[int], capacity: int, steps: int = 200) -> list[int]:
    """Sizes that, beside the largest one, come closest to *capacity*: depth-first, largest first, *steps* at most."""
    good_enough = capacity // 512
    best: list[int] = []
    best_room = capacity - sizes[-1]
    chosen: list[int] = [sizes[-1]]

    def search(room: int, below: int) -> bool:
        nonlocal best, best_room, steps
        if room < best_room:
            best, best_room = chosen[1:], room
        for place in range(bisect.bisect_right(sizes, room, 0, below) - 1, -1, -1):
            if best_room <= good_enough or steps <= 0:
                return True
            size = sizes[place]
            if chosen.count(size) >= len(waiting[size]):
                continue
            steps -= 1
            chosen.append(size)
            done = search(room - size, place + 1)
            chosen.pop()
            if done:
                return True
        return best_room <= good_enough

    search(best_room, len(sizes))
    return best


def fill(bins: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> float:
    """Share of the rows' places that hold a token."""
    used = sum(min(lengths[index], capacity) for each in bins for index in each)
    return used / (len(bins) * capacity) if bins else 1.0


def shuffle_bins(bins: Sequence[Sequence[int]], seed: int, epoch: int) -> list[list[int]]:
    """The rows in the order of *epoch*, and each row's documents shuffled; the same on every machine."""
    generator = random.Random(f"rows/{seed}/{epoch}")
    shuffled = [list(each) for each in bins]
    generator.shuffle(shuffled)
    for each in shuffled:
        generator.shuffle(each)
    return shuffled
