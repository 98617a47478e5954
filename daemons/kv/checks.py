"""Checks of slices.  Invariant: an invalid slice raises StateError before any write."""

from __future__ import annotations

from daemons.errors import StateError
from daemons.kv.sequences import OpenedSequence, Sequences
from daemons.ops.operations import MAX_DECODE_TOKENS
from lucevisor.protocol.steps import Slice


def check_slice(s: Slice, where: str, seen: set[int], vocabulary: int) -> None:
    """Raise StateError unless the slice may be in a step; its sequence joins ``seen``."""
    if s.sequence in seen:
        raise StateError(where, "the sequence has another slice in this step")
    seen.add(s.sequence)
    if not s.tokens or s.start < 0:
        raise StateError(where, f"{len(s.tokens)} tokens at position {s.start}")
    if not 0 <= s.n_drafts < len(s.tokens) or (s.n_drafts and not s.sample):
        how = "samples" if s.sample else "samples nothing"
        raise StateError(where, f"{s.n_drafts} drafts among {len(s.tokens)} tokens of a slice that {how}")
    if min(s.tokens) < 0 or max(s.tokens) >= vocabulary:
        bad = next(t for t in s.tokens if not 0 <= t < vocabulary)
        raise StateError(where, f"token id {bad} is outside the vocabulary of {vocabulary}")


def check_states(s: Slice, where: str, sequence: OpenedSequence, sequences: Sequences, used: set[int]) -> None:
    """Raise StateError unless the slice may read and write its recurrent states, which join ``used``."""
    n, n_states = len(s.tokens), len(s.states)
    if s.n_drafts and n_states != s.n_drafts + 1:
        raise StateError(where, f"{n_states} states to write; {s.n_drafts} drafts take {s.n_drafts + 1}")
    if n_states and not n_states <= n <= MAX_DECODE_TOKENS:
        limit = f"a slice that keeps states has as many tokens or more, and at most {MAX_DECODE_TOKENS}"
        raise StateError(where, f"{n_states} states to write in a slice of {n} tokens: {limit}")
    for i, state in enumerate(s.states):
        if sequences.check_device(where, state) and not (i and n_states == n and s.states[0] == sequence.state):
            how = "of a slice that keeps one after each token, behind the live one"
            raise StateError(where, f"state {state} is a draft's, and may only be one {how}")
    for state in [*s.states, sequence.state] if sequence.state not in s.states else s.states:
        if state in used:
            raise StateError(where, f"recurrent state {state} is used twice in this step")
        used.add(state)
