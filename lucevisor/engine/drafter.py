"""The drafter of an engine: who drafts behind the pipeline that is attached, and what becomes of its answers.

Knows neither sequences nor how many tokens are drafted (drafting/, scheduling/drafts.py).
Invariant: scheduler and pipeline have a drafter, or neither has; a wrong answer only detaches it.
"""

from __future__ import annotations

from collections.abc import Callable

from lucevisor.engine.pipeline import Pipeline, PipelineFailure, StageLink
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.step import WrongResult
from lucevisor.protocol.steps import StepResult


class DrafterAttachment:
    """``on_lost`` is told why a drafter was detached by itself.

    ``pipeline``: the one attached now.  ``proceed`` sends the steps that have become possible; it is told whether any
    may have.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        on_lost: Callable[[PipelineFailure], None],
        *,
        pipeline: Callable[[], Pipeline | None],
        proceed: Callable[[bool], None],
    ) -> None:
        self._scheduler, self._on_lost = scheduler, on_lost
        self._pipeline, self._proceed = pipeline, proceed

    def listen(self, pipeline: Pipeline) -> None:
        """Hear the drafter of a new pipeline, when it gets one."""
        pipeline.drafts.on_drafted = self._drafted
        pipeline.drafts.on_lost = self._lost

    def attach(self, link: StageLink, *, with_output: bool, kept: bool = False) -> None:
        """Draft with the draft stage behind ``link``, whose daemon holds no sequences yet.

        ``with_output``: it is the output stage's daemon.  ``kept``: it has the state of the drafter before, and no step
        was planned since that was detached.  Raises RuntimeError without a pipeline or with a drafter,
        ValueError if the limits have no room for one.
        """
        pipeline = self._pipeline()
        if pipeline is None:
            raise RuntimeError("there is no pipeline to attach a drafter to; attach one first")
        self._scheduler.attach_drafter(with_output=with_output, kept=kept)
        pipeline.drafts.attach(link, with_output=with_output)
        self._proceed(True)

    def detach(self) -> None:
        """Go on without drafts.  Does nothing without a drafter; the pipeline takes its own along when it goes."""
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.drafts.detach()
        self._scheduler.detach_drafter()
        self._proceed(True)

    def _drafted(self, result: StepResult) -> None:
        """Let the sequences go on that waited for these drafts."""
        try:
            goes_on = self._scheduler.drafting.on_drafts(result)
        except WrongResult as error:
            text = f"the draft stage sent a wrong result: {error}"
            self._lost(PipelineFailure(result.stage, "protocol_error", text))
        else:
            self._proceed(goes_on)

    def _lost(self, failure: PipelineFailure) -> None:
        self.detach()
        self._on_lost(failure)
