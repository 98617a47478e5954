"""What a round of decoding takes beside its step and its drafts: links, planning, and waiting for the next message.

Pure; times are arguments.  A step that runs ahead has no gap before it, one that waits for drafts or tokens has: the
choice of widths compares whole rounds.  Only rounds in which nothing else was computed are looked at, and none between
drafts and plain decoding, which has to wait for a verdict once.
"""

from __future__ import annotations

from collections.abc import Callable

from lucevisor.engine.step import ScheduledStep


class RoundGaps:
    """Follows the steps of one pipeline in the order of their results.

    ``runs_ahead``: whether plain decoding does; then steps that waited for their tokens, as single ones between drafts
    do, are none of it.
    """

    def __init__(self, runs_ahead: Callable[[], bool] = lambda: False) -> None:
        self._runs_ahead = runs_ahead
        self._last: ScheduledStep | None = None
        self._applied_at = 0.0
        self._draft_s = 0.0  # of the drafts behind the last step

    def drafted(self, step: ScheduledStep, seconds: float) -> None:
        """Note what the drafts behind a step took."""
        if step is self._last:
            self._draft_s = seconds

    def applied(self, step: ScheduledStep, seconds: float, now: float) -> tuple[bool, float] | None:
        """Note a step that took ``seconds`` in the stages; return whether drafts were asked for behind the last one,
        and the gap between the two results: negative where stages prepare a step while another one computes.

        None if other steps came in between, or computed prompts.
        """
        last, gap = self._last, now - self._applied_at - self._draft_s - seconds
        self._last, self._applied_at, self._draft_s = step, now, 0.0
        if last is None or step.step_id != last.step_id + 1 or not step.only_decodes or not last.only_decodes:
            return None
        if step.parts.keys() != last.parts.keys():
            return None
        if last.n_ahead:
            return True, gap
        if any(part.slice.n_drafts for part in last.parts.values()) or (self._runs_ahead() and not step.follows):
            return None
        return False, gap
