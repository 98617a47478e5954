"""The layout of a lone slice without its last rows: a verify slice of which fewer drafts were made than asked for.

Who knows that waits with all else done, so the layout is changed in place.
"""

from __future__ import annotations

from daemons.kv.batch import Layout


def leave_out_rows(layout: Layout, n_rows: int) -> None:
    """Keep the first ``n_rows`` rows of the layout of one slice that is not padded; at least two if it keeps states."""
    [group], n = layout.groups, layout.n_rows
    if group.n_states:
        group.states = [states[: len(states) - (n - n_rows)] for states in group.states]
        group.n_states = len(group.states[0])
    layout.n_rows = group.n = n_rows
    numbers, end = layout.numbers, (2 + len(layout.spaces)) * n
    columns = [number for at in range(0, end, n) for number in numbers[at : at + n_rows]]
    layout.numbers = [*columns, *group.numbers()]
