"""Images in a sequence: which rows of a slice are theirs, and where their tokens stand (M-RoPE).  Knows no tensors.

A token of a text stands one behind the token before it.  With M-RoPE all tokens of an image stand at the time after the
text before it, each at its row and column from there on, and the text goes on behind the longer of its sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from daemons.errors import StateError
from lucevisor.protocol.steps import ImageSpan

PLACEHOLDER_ID = 0
"""Stands for the ids of an image's tokens where a model looks up more than their embedding rows."""


class Positions(NamedTuple):
    """Of the tokens of a slice, by axis; ``rows`` and ``columns`` are ``times`` without images among them."""

    times: list[int]
    rows: list[int]
    columns: list[int]


def check_images(images: Sequence[ImageSpan], where: str) -> None:
    """Raise StateError unless the images follow each other."""
    for image in images:
        if image.start < 0 or image.height < 1 or image.width < 1:
            raise StateError(where, f"an image of {image.height} x {image.width} tokens at {image.start}")
    for one, other in pairwise(images):
        if other.start < one.stop:
            raise StateError(where, f"an image at {other.start} begins before {one.stop}, where the one before ends")


def image_rows(images: Sequence[ImageSpan], start: int, n: int) -> list[int]:
    """Return the rows of a slice of ``n`` tokens from ``start`` on that are images'."""
    rows: list[int] = []
    for image in images:
        rows += range(max(0, image.start - start), min(n, image.stop - start))
    return rows


def blocks_in(images: Sequence[ImageSpan], start: int, n: int, where: str) -> list[tuple[int, int]]:
    """Return the rows of each image in a slice, from the first to behind the last.  Raises StateError for one that the
    slice has a part of."""
    inside = [image for image in images if image.start < start + n and start < image.stop]
    blocks = [(image.start - start, image.stop - start) for image in inside]
    for first, stop in blocks:
        if first < 0 or stop > n:
            raise StateError(where, f"rows {first} to {stop} of {n} are an image, of which it has a part")
    return blocks


def shift(images: Sequence[ImageSpan], position: int) -> int:
    """Return how far a text at ``position`` stands before it, because of the images that have ended there."""
    ended = [image for image in images if image.stop <= position]
    return sum(image.height * image.width - max(image.height, image.width) for image in ended)


def rope_positions(images: Sequence[ImageSpan], start: int, n: int) -> Positions:
    """Return where the tokens of a slice stand."""
    times, rows, columns = list[int](), list[int](), list[int]()
    at, end = start, start + n
    while at < end:
        image = next((image for image in images if image.stop > at), None)
        if image is None or at < image.start:
            stop = end if image is None else min(end, image.start)
            behind = shift(images, at)
            text = range(at - behind, stop - behind)
            for axis in (times, rows, columns):
                axis += text
        else:
            stop, origin = min(end, image.stop), image.start - shift(images, image.start)
            tokens = range(at - image.start, stop - image.start)
            times += [origin] * len(tokens)
            rows += [origin + i // image.width for i in tokens]
            columns += [origin + i % image.width for i in tokens]
        at = stop
    return Positions(times, rows, columns)
