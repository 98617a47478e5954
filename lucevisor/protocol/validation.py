"""Check what a daemon says before anything uses it: the border of the supervisor, and of a daemon's token ring.

A daemon may be damaged, or have memory that flips bits. Types and lengths were checked when its frame was decoded;
here: ids in the vocabulary, finite numbers, counts within what was asked, and no time longer than it can have taken."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from lucevisor.model.values import PAGE_TOKENS
from lucevisor.protocol.loading import Hello, Load, Loaded
from lucevisor.protocol.messages import Heartbeat, ImageRows, Message, Progress, Unloaded, WindowScores
from lucevisor.protocol.steps import PENDING, PendingCancelled, PromptLogprobs, Sampled, Slice, Step, StepResult

MAX_INTEGER: Final = 2**56
"""More than any count or number of bytes."""
CLOCK_SLACK_S: Final = 1.0
"""By so much two processes may disagree about a time."""


@dataclass(frozen=True, slots=True)
class UnansweredStep:
    """A step that a stage has yet to answer. ``elapsed_s``: since it was planned. ``n_top``: how many of the best ids
    come with each token of a sequence, -1: no log-probability; empty without the output stage."""

    step: Step
    elapsed_s: float
    n_top: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class DaemonFacts:
    """Facts about a daemon from other sources than itself. ``age_s``: of its process. ``load``: the Load that it was
    sent; ``replays``: with a replay. ``vocabulary``: ids of the model."""

    age_s: float
    load: Load | None = None
    replays: bool = False
    vocabulary: int = MAX_INTEGER

    @property
    def stages(self) -> set[int]:
        """The stages that it runs, the draft stage included."""
        if self.load is None:
            return set()
        return {plan.stage for plan in self.load.stages} | self.draft_stages

    @property
    def draft_stages(self) -> set[int]:
        """Its draft stage, if it runs one."""
        return set() if self.load is None or self.load.draft is None else {self.load.draft.stage}

    @property
    def output_stages(self) -> set[int]:
        """The output stage, if it runs it."""
        return set() if self.load is None else {plan.stage for plan in self.load.stages if plan.output}


class _Fault(Exception):
    """A value that cannot be true."""


def fault_of(message: Message, payload: memoryview, daemon: DaemonFacts, asked: UnansweredStep | None = None) -> str:
    """Return why a message cannot be true; empty if it can. ``asked``: the step that a StepResult answers, if known."""
    try:
        if isinstance(message, StepResult):
            _check_result(message, daemon, asked)
        else:
            _check_numbers(message, type(message).__name__)
            _check_message(message, payload, daemon)
    except _Fault as fault:
        return str(fault)
    return ""


def ids_fault(where: str, ids: Iterable[int], vocabulary: int) -> str:
    """Return which of the ids that another daemon left in shared memory is not in the vocabulary; empty if all are."""
    try:
        _check_ids(where, ids, vocabulary)
    except _Fault as fault:
        return str(fault)
    return ""


def _check_message(message: Message, payload: memoryview, daemon: DaemonFacts) -> None:
    match message:
        case Hello(devices=devices, host_total_bytes=host_total_bytes):
            _check_counts("Hello", host_total_bytes=host_total_bytes)
            for device in devices:
                _check_counts("Hello.devices", index=device.index, free_bytes=device.free_bytes)
                _require(device.free_bytes <= device.total_bytes, "Hello.devices: more bytes are free than there are")
            _require(len({device.index for device in devices}) == len(devices), "Hello.devices: one is listed twice")
        case Loaded():
            _check_loaded(message, daemon)
        case Unloaded():
            _check_counts("Unloaded", parked_bytes=message.parked_bytes)
            _check_time("Unloaded.seconds", message.seconds, daemon.age_s)
        case Heartbeat():
            _check_time("Heartbeat.busy_s", message.busy_s, daemon.age_s)
            _check_counts("Heartbeat", count=message.count, step_id=message.step_id, n_steps=message.n_steps,
                          n_tokens=message.n_tokens, rss_bytes=message.rss_bytes)  # fmt: skip
            for n_bytes in message.free_bytes:
                _check_counts("Heartbeat", free_bytes=n_bytes)
        case Progress():
            _check_counts("Progress", done_bytes=message.done_bytes, total_bytes=message.total_bytes)
            _require(daemon.load is not None, f"Progress is of model {message.model}, which it does not load")
            _require(message.stage in daemon.stages or message.stage == -1, f"Progress is of stage {message.stage}")
        case PendingCancelled(stage=stage):
            _require(stage in daemon.stages, f"PendingCancelled is of stage {stage}, which it does not run")
        case WindowScores(n_scores=n_scores, compute_s=compute_s):
            _check_counts("WindowScores", n_scores=n_scores)
            _check_time("WindowScores.compute_s", compute_s, daemon.age_s)
            _require(len(payload) == 4 * n_scores, f"WindowScores: {n_scores} scores in {len(payload)} bytes")
            _check_finite("the scores", payload.cast("f").tolist() if n_scores else [])
        case ImageRows(n_rows=n_rows, compute_s=compute_s):
            _check_counts("ImageRows", n_rows=n_rows)
            _check_time("ImageRows.compute_s", compute_s, daemon.age_s)
        case _:
            if (seconds := getattr(message, "seconds", None)) is not None:
                _check_time(f"{type(message).__name__}.seconds", seconds, daemon.age_s)
            if (n_saved := getattr(message, "n_bytes", None)) is not None:
                _check_counts(type(message).__name__, n_bytes=n_saved)


def _check_loaded(message: Loaded, daemon: DaemonFacts) -> None:
    load = daemon.load
    _check_time("Loaded.seconds", message.seconds, daemon.age_s)
    asked = [] if load is None else [(shard.device, shard.layers) for plan in load.stages for shard in plan.shards]
    found = [(use.device, use.layers) for use in message.shards]
    _require(found == asked, f"Loaded.shards are {len(found)}, which are not the {len(asked)} of the Load")
    _require(message.draft is None or (load is not None and load.draft is not None), "Loaded.draft was not asked for")
    _require(message.score is None or (load is not None and load.score is not None), "Loaded.score was not asked for")
    _require(
        message.vision is None or (load is not None and load.vision is not None), "Loaded.vision was not asked for"
    )
    _require(not message.replayed or daemon.replays, "Loaded.replayed, but it was sent nothing to replay")
    for n_bytes in message.workspace_bytes.values():
        _check_counts("Loaded", workspace_bytes=n_bytes)
    for use in [*message.shards, message.draft, message.score, message.vision]:
        if use is not None:
            _check_counts("Loaded", weight_bytes=use.weight_bytes, state_bytes=use.state_bytes,
                          free_bytes=use.free_bytes, host_state_bytes=use.host_state_bytes)  # fmt: skip


def _check_result(result: StepResult, daemon: DaemonFacts, asked: UnansweredStep | None) -> None:
    _require(result.stage in daemon.stages, f"StepResult is of stage {result.stage}, which it does not run")
    elapsed_s = daemon.age_s if asked is None else min(asked.elapsed_s, daemon.age_s)
    _check_time("compute_s", result.compute_s, elapsed_s)
    _check_time("hop_s", result.hop_s, elapsed_s)
    _check_time("wait_s", result.wait_s, daemon.age_s)
    _check_time("upkeep_s", result.upkeep_s, daemon.age_s)
    slices = None if asked is None else {piece.sequence: piece for piece in asked.step.slices}
    n_top = {} if asked is None else asked.n_top
    draws = result.stage in daemon.output_stages
    if result.sampled or draws:
        _check_sampled(result.sampled, slices, n_top, daemon.vocabulary, draws=draws)
    if result.invalid:
        _require(draws, "invalid: it has no logits")
        _check_known("invalid", result.invalid, slices)
    for of_prompt in result.prompt_logprobs:
        _check_prompt_logprobs(of_prompt, slices, n_top, daemon.vocabulary)
    for one in result.page_scores:
        _check_finite("page_scores", one.scores)
        _check_known("page_scores", [one.sequence], slices if asked is None else asked.step.rank_pages)
        if slices is not None:
            piece = slices[one.sequence]
            n_pages = (piece.start + len(piece.tokens)) // PAGE_TOKENS + 1
            _require(len(one.scores) <= n_pages, f"page_scores: {len(one.scores)} pages of {n_pages}")
    if result.drafts:
        _require(result.stage in daemon.draft_stages, "drafts: it is no draft stage")
        _require(len({one.sequence for one in result.drafts}) == len(result.drafts), "drafts: a sequence comes twice")
    for drafted in result.drafts:
        _check_known("drafts", [drafted.sequence], slices)
        _check_ids("drafts", drafted.tokens, daemon.vocabulary)
        n, n_probabilities = len(drafted.tokens), len(drafted.probabilities)
        _require(n_probabilities in (0, n), f"drafts: {n_probabilities} probabilities of {n} tokens")
        _check_finite("drafts", drafted.probabilities)
        _require(all(-0.01 <= p <= 1.01 for p in drafted.probabilities), "drafts: a probability is outside 0 to 1")
        if slices is not None:
            most = slices[drafted.sequence].num_draft_tokens
            _require(n <= most, f"drafts: {n} of a sequence that asked for {most}")
    if result.segments and asked is not None:
        _check_segments(result.segments, asked.step)


def _check_sampled(
    sampled: Sequence[Sampled],
    slices: Mapping[int, Slice] | None,
    n_top: Mapping[int, int],
    vocabulary: int,
    *,
    draws: bool,
) -> None:
    counts: dict[int, int] = {}
    for one in sampled:
        counts[one.sequence] = counts.get(one.sequence, 0) + 1
        if not 0 <= one.token < vocabulary:
            raise _Fault(f"sampled: id {one.token} is not one of {vocabulary}")
        if one.logprob is not None or one.top or one.mu is not None:
            _check_finite("sampled", [x for x in (one.logprob, one.mu) if x is not None])
            _check_tops("sampled", [one.top], n_top.get(one.sequence), vocabulary)
    if slices is not None:
        _check_known("sampled", counts, slices)
        for sequence, n in counts.items():
            piece = slices[sequence]
            most = 1 + piece.n_drafts if piece.sample or not draws else 0
            _require(n <= most, f"sampled: {n} tokens of sequence {sequence}, which asked for {most}")
        for sequence, piece in slices.items():
            wanted = piece.sample if draws else piece.tokens == [PENDING] or piece.drafts_pend
            _require(not wanted or sequence in counts, f"sampled: no token of sequence {sequence}, which asked for one")


def _check_prompt_logprobs(
    found: PromptLogprobs, slices: Mapping[int, Slice] | None, n_top: Mapping[int, int], vocabulary: int
) -> None:
    _check_finite("prompt_logprobs", found.logprobs)
    _require(len(found.tops) == len(found.logprobs), "prompt_logprobs: tops and logprobs differ in number")
    _check_known("prompt_logprobs", [found.sequence], slices)
    _check_tops("prompt_logprobs", found.tops, n_top.get(found.sequence), vocabulary)
    if slices is not None:
        piece = slices[found.sequence]
        _require(
            (found.start, len(found.logprobs)) == (piece.start + 1, len(piece.logprob_targets)),
            f"prompt_logprobs: {len(found.logprobs)} from {found.start} on, "
            f"not {len(piece.logprob_targets)} from {piece.start + 1} on",
        )


def _check_tops(what: str, tops: Iterable[Sequence[tuple[int, float]]], most: int | None, vocabulary: int) -> None:
    for top in tops:
        _check_ids(what, [token for token, _ in top], vocabulary)
        _check_finite(what, [value for _, value in top])
        if most is not None:
            _require(len(top) <= max(0, most), f"{what}: {len(top)} log-probabilities where {most} were asked for")


def _check_segments(segments: Sequence[tuple[str, Sequence[int]]], step: Step) -> None:
    n_pooled = sum(piece.pooled for piece in step.slices)
    wanted = {"logits": step.want_logits, "hidden": step.want_hidden, "pooled": n_pooled > 0}
    for name, shape in segments:
        _require(wanted.get(name, False), f"segments: {name[:40]!r} was not asked for")
        if name == "pooled":
            _require(len(shape) == 2 and shape[0] == n_pooled, f"segments: pooled is {shape} of {n_pooled} texts")
            continue
        rows = shape[0 if name == "logits" else 1] if len(shape) > (name == "hidden") else -1
        _require(rows == step.n_tokens, f"segments: {name} has {rows} rows of {step.n_tokens}")


# ---- the kinds of checks


def _require(possible: bool, fault: str) -> None:
    if not possible:
        raise _Fault(fault)


def _check_known(what: str, sequences: Iterable[int], known: Collection[int] | None) -> None:
    for sequence in sequences if known is not None else ():
        _require(sequence in known, f"{what}: sequence {sequence} was not asked about")  # type: ignore[operator]


def _check_ids(what: str, ids: Iterable[int], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise _Fault(f"{what}: id {token} is not one of {vocabulary}")


def _check_finite(what: str, numbers: Iterable[float]) -> None:
    for number in numbers:
        if not math.isfinite(number):
            raise _Fault(f"{what}: {number} is not a number to work with")


def _check_time(what: str, seconds: float, max_s: float) -> None:
    if not -CLOCK_SLACK_S / 100 <= seconds <= max_s + CLOCK_SLACK_S:  # also what is not a number
        raise _Fault(f"{what} is {seconds} s, which it cannot have taken: at most {max_s:.3f} s")


def _check_counts(what: str, **counts: int) -> None:
    for name, n in counts.items():
        if not 0 <= n <= MAX_INTEGER:
            raise _Fault(f"{what}.{name} is {n}")


def _check_numbers(value: object, what: str) -> None:
    """Check that no number anywhere in a record is infinite or NaN."""
    match value:
        case float():
            _require(math.isfinite(value), f"{what} is {value}")
        case msgspec.Struct():
            for name in value.__struct_fields__:
                _check_numbers(getattr(value, name), f"{what}.{name}")
        case dict():
            for name, inner in value.items():
                _check_numbers(inner, f"{what}.{name}")
        case list() | tuple():
            for inner in value:
                _check_numbers(inner, what)
        case _:
            pass
