"""A shard daemon that loads its stages and computes nothing: a step each PACED_STEP_S seconds, which samples PACED_IDS.

    PACED_STEP_S=0.01 PACED_IDS=300,301 python bench/paced_daemon.py --group=... (the arguments of `python -m daemons`)

With PACED_STAGE_S and PACED_ROW_S each step takes so long from when its rows are there, and so long more for each row.
Started by bench/streams.py and bench/scale.py as a group's interpreter.  Protocol, boundary memory and state operations
are a real daemon's.
"""

import os
import sys
import time

sys.path[0] = os.environ["PYTHONPATH"]  # the supervisor's staging directory, as `python -m daemons` has it

import torch  # noqa: E402

from daemons import runner  # noqa: E402
from daemons.main import main  # noqa: E402
from daemons.step_output import StepOutput  # noqa: E402
from daemons.token_ring import RunAheadStep  # noqa: E402
from lucevisor.protocol.steps import Sampled, StepResult  # noqa: E402

STEP_S = float(os.environ.get("PACED_STEP_S", 0.0))
STAGE_S, ROW_S = (float(os.environ.get(name, 0.0)) for name in ("PACED_STAGE_S", "PACED_ROW_S"))
IDS = [int(number) for number in os.environ["PACED_IDS"].split(",")]
_due_s = 0.0


@torch.inference_mode()
def run_step(
    self,
    step,
    stage_index,
    wait_s,
    masks=None,
    finish_previous=lambda: None,
    await_rows=None,
    posted=False,
    poll_previous=None,
    embeddings=b"",
):
    """In place of ModelRunner.run_step.  After a pause the step takes no time."""
    global _due_s
    started = time.monotonic()
    _due_s = max(_due_s + STEP_S, started)
    finish_previous()
    self.stages[stage_index].apply(step.operations)
    sampled, plan, hop_s = [], self._plans[stage_index], 0.0
    if step.n_tokens:
        if step.depends_on_step and plan.embedding:
            following = RunAheadStep(self._token_ring, step, await_rows)
            following(torch.zeros(step.n_tokens, dtype=torch.int64))
            sampled = following.tokens
        elif plan.source is not None and await_rows is not None:
            hop_s = await_rows(self._boundaries[plan.source].buffer, step.region, step.step_id, posted)
        if STAGE_S:
            started = time.monotonic()
            _due_s = started + STAGE_S + ROW_S * step.n_tokens
        time.sleep(max(0.0, _due_s - time.monotonic()))
        if plan.target is not None:
            self._boundaries[plan.target].ring(step)
        else:
            ends = [(piece.sequence, piece.start + len(piece.tokens)) for piece in step.slices if piece.sample]
            sampled = [Sampled(sequence, IDS[end % len(IDS)]) for sequence, end in ends]
    result = StepResult(step.step_id, stage_index, sampled, time.monotonic() - started, wait_s, hop_s=hop_s)
    return StepOutput(result, [], step=step)


runner.ModelRunner.run_step = run_step
sys.exit(main(sys.argv[1:]))
