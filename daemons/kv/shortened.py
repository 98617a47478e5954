"""The layout of a lone slice without its last rows: a verify slice of which fewer drafts were made than asked for."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import chain

from daemons.kv.batch import Layout


def shortened(layout: Layout, n_rows: int) -> Layout:
    """Return the layout of the first ``n_rows`` rows, at least two, of a step of one short slice that is not padded."""
    [group] = layout.groups
    [states] = group.states
    n, n_left_out = layout.n_rows, layout.n_rows - n_rows
    if group.n_states:
        states = states[: len(states) - n_left_out]
        group = replace(group, states=[states], n_states=len(states))
    one = copy(layout)
    one.n_rows, one.groups = n_rows, [replace(group, n=n_rows)]
    columns = [layout.numbers[at : at + n_rows] for at in range(0, (2 + len(layout.spaces)) * n, n)]
    one.numbers = [*chain.from_iterable(columns), *one.groups[0].numbers()]
    return one
