"""Throughput and latency of pipelines over several hosts, without a GPU: formulas, and a simulator of the real core.

    python bench/scale.py predict [--json FILE]             formulas beside simulations, the table of docs/scale.md
    python bench/scale.py simulate --hosts 8 --streams 64 [--latency-ms 0.1] [--mbyte-s 1250] [--drafts 3] ...
    python bench/scale.py saturate                          where one supervisor ends, and what several do then
    python bench/scale.py measure [--json FILE]             paced daemons here, beside the same simulated; needs root

The simulator runs the engine's core (scheduler, pipeline, journal) on a simulated clock.  Stages and links are
stand-ins that take the times of ``Model`` and ``Cluster``; the supervisor takes the CPU time that its core takes here,
measured for each event, and ``Costs`` for what is around it.  docs/scale.md has the formulas, and what was measured
against them.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import slow_link
from make_gguf import write
from records import machine, write_json
from scale_paced import wide_model

from lucevisor.engine import events as ev
from lucevisor.engine.core import CoreSettings, EngineCore
from lucevisor.engine.journal import CopyRows, FileRows
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.pipeline import SendFrame
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenEvent
from lucevisor.engine.router import Candidate, Health, Router
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.frames import HEADER_BYTES, decode, encode, parse_header
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import Drafted, DraftStep, Sampled, SamplingParams, Slice, Step, StepResult

TOKEN, DRAFT = 7, 5
"""What stages sample where no draft is right, and what they draft."""
SHORT_PROMPT = 16


@dataclass(frozen=True, kw_only=True)
class Model:
    """Seconds of all layers together on one device, by rows of a step: the 27B shape in Q4_K_M on an H200.

    Steps of few rows read all weights (``first_s`` and ``row_s`` for each row), those of many rows compute
    (``chunk_s``, ``chunk_row_s``).  ``draft_s``: one draft.  ``stage_s``: what a stage adds, whatever its layers.
    """

    first_s: float = 5.6e-3
    row_s: float = 0.24e-3
    chunk_s: float = 16e-3
    chunk_row_s: float = 0.103e-3
    draft_s: float = 0.2e-3
    stage_s: float = 0.09e-3
    row_bytes: int = 10_240
    shares: tuple[float, ...] = ()
    """Of the layers, by stage; equal shares by default."""

    def step_s(self, n_rows: int) -> float:
        return min(self.first_s + self.row_s * n_rows, self.chunk_s + self.chunk_row_s * n_rows)

    def stage_time(self, n_rows: int, n_stages: int, stage: int = 0) -> float:
        return self.step_s(n_rows) * (self.shares[stage] if self.shares else 1 / n_stages) + self.stage_s


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of a pipeline with a stage each; the supervisor is on the first one.

    ``hop_s``: what both ends of a message between two hosts take beside the link.  ``copies``: the supervisor gets the
    rows of every boundary for its journal.  ``posted``: steps go to all stages at once, and tokens from the last stage
    to the first; otherwise everything goes through the supervisor.
    """

    n_hosts: int
    latency_s: float = 0.1e-3
    bytes_per_s: float = 1.25e9
    hop_s: float = 40e-6
    copies: bool = True
    posted: bool = True


@dataclass(frozen=True, kw_only=True)
class Costs:
    """CPU time of a supervisor's process beside its core: for a frame in or out, a token to a reader of its request,
    and a byte of rows for the journal.  ``core_s``: of an event, in place of what is measured.
    """

    frame_s: float = 24e-6
    token_s: float = 2e-6
    byte_s: float = 0.5e-9
    core_s: float | None = None


HTTP_TOKEN_S = 60e-6
"""CPU time of a token that is streamed over HTTP, beside what it takes without: of 62 to 82 us in bench/streams.py
(Zen 5), the engine takes 11."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Clients that send one request after the other.  A conversation has ``turns``: each prompt is the one before, its
    answer and ``prompt`` new tokens; the first begins with ``system`` tokens, one text of ``n_systems``.  ``think_s``:
    the mean pause before the next.
    """

    streams: int
    prompt: int = SHORT_PROMPT
    answer: int = 128
    turns: int = 1
    system: int = 0
    n_systems: int = 1
    think_s: float = 0.0


# ---- formulas


@dataclass(frozen=True)
class Prediction:
    """``round_s``: from a token of a stream to its next, or to the next accepted ones.  ``bounds``: the same by what
    would be the only limit.
    """

    tokens_per_s: float
    round_s: float
    bounds: dict[str, float]

    @property
    def limit(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])


def accepted_tokens(n_drafts: int, chance: float) -> float:
    """Mean tokens of a verification: the one that is certain, and drafts up to the first that is wrong."""
    return sum(chance**i for i in range(n_drafts + 1))


def supervisor_step_s(cluster: Cluster, costs: Costs, rows: int, row_bytes: int, n_tokens: float) -> float:
    """CPU time of a supervisor for a step: a frame to and from every stage, copies of rows, and its tokens."""
    n = cluster.n_hosts
    copied = (n - 1) * (rows * row_bytes * costs.byte_s + costs.frame_s) if cluster.copies else 0.0
    return n * (2 * costs.frame_s + (costs.core_s or 0.0)) + copied + n_tokens * costs.token_s


def hops_s(cluster: Cluster, rows: int, row_bytes: int) -> float:
    """Time of rows on their way through all stages; copies for the supervisor leave first, but on its own host."""
    n, sent = cluster.n_hosts, rows * row_bytes / cluster.bytes_per_s
    return (n - 1) * (cluster.latency_s + cluster.hop_s + sent) + (max(0, n - 2) * sent if cluster.copies else 0.0)


def predict_decode(
    model: Model, cluster: Cluster, streams: int, *, drafts: int = 0, chance: float = 0.0, costs: Costs | None = None
) -> Prediction:
    """Decoding streams, dealt into as many micro-batches as there are stages."""
    n = cluster.n_hosts
    groups = min(n, streams)
    rows = math.ceil(streams / groups) * (1 + drafts)
    stages = [model.stage_time(rows, n, stage) for stage in range(n)]
    drafting = model.draft_s * drafts
    back = cluster.latency_s + cluster.hop_s if n > 1 else 0.0
    bounds = {
        "stages": groups * max([*stages[:-1], stages[-1] + drafting]),
        "latency": sum(stages) + drafting + hops_s(cluster, rows, model.row_bytes) + back,
    }
    if cluster.copies and n > 2:
        bounds["link of the supervisor"] = groups * rows * (n - 2) * model.row_bytes / cluster.bytes_per_s
    tokens = accepted_tokens(drafts, chance)
    if costs is not None:
        each = supervisor_step_s(cluster, costs, rows, model.row_bytes, streams * tokens / groups)
        bounds["supervisor"] = groups * (each + (2 * costs.frame_s if drafts else 0.0))
    round_s = max(bounds.values())
    return Prediction(streams * tokens / round_s, round_s, bounds)


def predict_prompt(
    model: Model, cluster: Cluster, n_tokens: int, chunk: int, *, costs: Costs | None = None
) -> Prediction:
    """A prompt that is alone, in chunks that follow each other, one more than stages at once; ``round_s`` is the time
    of its first token.
    """
    n, whole = cluster.n_hosts, math.ceil(n_tokens / chunk)
    sent = chunk * model.row_bytes / cluster.bytes_per_s if n > 1 else 0.0
    bounds = {"stages": max(model.stage_time(chunk, n, i) for i in range(n))}
    if n > 1:
        bounds["link of a stage"] = sent * (2 if cluster.copies and n > 2 else 1)
    if cluster.copies and n > 2:
        bounds["link of the supervisor"] = (n - 2) * sent
    if costs is not None:
        bounds["supervisor"] = supervisor_step_s(cluster, costs, chunk, model.row_bytes, 0)
    through = sum(model.stage_time(chunk, n, i) for i in range(n)) + hops_s(cluster, chunk, model.row_bytes)
    bounds["steps in flight"] = (through + cluster.latency_s + bounds.get("supervisor", 0.0)) / (n + 1)
    last = n_tokens - (whole - 1) * chunk
    through = sum(model.stage_time(last, n, i) for i in range(n)) + hops_s(cluster, last, model.row_bytes)
    round_s = through + (whole - 1) * max(bounds.values())
    return Prediction(n_tokens / round_s, round_s, bounds)


# ---- the simulator


class Simulation:
    """A clock, and calls in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._n = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._n += 1
        heapq.heappush(self._calls, (when, self._n, call))

    def run(self, done: Callable[[], bool]) -> None:
        """Run until ``done``, or until nothing is left to do."""
        while self._calls and not done():
            self.now, _, call = heapq.heappop(self._calls)
            call()


class Network:
    """Messages between hosts: each takes its sender's card, then the latency, then its receiver's card."""

    def __init__(self, simulation: Simulation, cluster: Cluster) -> None:
        self._simulation, self._cluster = simulation, cluster
        self._sending: dict[int, float] = defaultdict(float)
        self._receiving: dict[int, float] = defaultdict(float)
        self.n_bytes: Counter[tuple[int, int]] = Counter()

    def send(self, source: int, target: int, n_bytes: int, call: Callable[[], None]) -> None:
        now, cluster = self._simulation.now, self._cluster
        if source == target:
            self._simulation.at(now, call)
            return
        seconds = n_bytes / cluster.bytes_per_s
        begun = max(now, self._sending[source])
        self._sending[source] = begun + seconds
        arrived = max(begun + cluster.latency_s, self._receiving[target]) + seconds
        self._receiving[target] = arrived
        self.n_bytes[source, target] += n_bytes
        self._simulation.at(arrived + cluster.hop_s, call)


class Process:
    """A supervisor's event loop: one thing after the other, each for the CPU time that it takes."""

    def __init__(self, simulation: Simulation, costs: Costs) -> None:
        self._simulation, self.costs = simulation, costs
        self._waiting: deque[Callable[[], float]] = deque()
        self._running = False
        self.busy_s = 0.0

    def take(self, work: Callable[[], float]) -> None:
        """Queue ``work``, which returns the seconds that it takes."""
        self._waiting.append(work)
        if not self._running:
            self._running = True
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._running = False
            return
        seconds = self._waiting.popleft()()
        self.busy_s += seconds
        self._simulation.at(self._simulation.now + seconds, self._next)


class Stage:
    """A daemon's compute thread: steps in the order sent, each when its rows are there."""

    def __init__(self, replica: Replica, index: int) -> None:
        self.replica, self.index, self.busy_s, self.n_steps = replica, index, 0.0, 0
        self._queue: deque[Step | DraftStep] = deque()
        self._arrived: set[int] = set()  # steps whose rows are here; of the first stage, whose tokens or drafts are
        self._busy = False

    def receive(self, message: Step | DraftStep) -> None:
        self._queue.append(message)
        self._begin()

    def rows_arrived(self, step_id: int) -> None:
        self._arrived.add(step_id)
        self._begin()

    def _awaited(self, step: Step) -> int:
        """The step whose rows, tokens or drafts this one waits for; 0: none."""
        if not step.slices:
            return 0
        if self.index:
            return step.step_id
        return step.depends_on_step or step.drafts_of

    def _begin(self) -> None:
        if self._busy or not self._queue:
            return
        message = self._queue[0]
        replica, model = self.replica, self.replica.model
        if isinstance(message, DraftStep):
            width = max((s.num_draft_tokens for s in message.step.slices), default=0)
            seconds = model.draft_s * width
        else:
            awaited = self._awaited(message)
            if awaited and awaited not in self._arrived:
                return
            if self.index:
                self._arrived.discard(awaited)
            seconds = model.stage_time(message.n_tokens, replica.n_stages, self.index) if message.slices else 0.0
        self._queue.popleft()
        self._busy = True
        self.busy_s += seconds
        self.n_steps += 1
        done = self._drafted if isinstance(message, DraftStep) else self._done
        replica.simulation.at(replica.simulation.now + seconds, lambda: self._end(done, message))

    def _end(self, done: Callable[[Step | DraftStep], None], message: Step | DraftStep) -> None:
        self._busy = False
        done(message)
        self._begin()

    def _done(self, step: Step) -> None:
        replica = self.replica
        last = self.index == replica.n_stages - 1
        sampled: list[Sampled] = []
        if last:
            sampled = [token for part in step.slices if part.sample for token in replica.sample(part)]
        elif step.slices:
            n_bytes = step.n_tokens * replica.model.row_bytes
            if replica.cluster.copies:
                replica.send_copy(self.index, n_bytes)
            replica.send_rows(self.index, step.step_id, n_bytes)
        replica.answer(self.index, StepResult(step.step_id, self.index, sampled, compute_s=1e-3))
        if last and sampled and not any(part.num_draft_tokens for part in step.slices):
            replica.publish(step.step_id, len(sampled))

    def _drafted(self, message: DraftStep) -> None:
        replica, step = self.replica, message.step
        drafts = [
            Drafted(part.sequence, [DRAFT] * part.num_draft_tokens, [1.0] * part.num_draft_tokens)
            for part in step.slices
            if part.num_draft_tokens
        ]
        if drafts:
            replica.publish(step.step_id, sum(len(one.tokens) for one in drafts))
        replica.answer(self.index, StepResult(step.step_id, replica.n_stages, drafts=drafts, compute_s=1e-3))


class Replica:
    """A pipeline: the real core, its stages, and who waits for its answers."""

    def __init__(
        self,
        simulation: Simulation,
        process: Process,
        model: Model,
        cluster: Cluster,
        limits: EngineLimits,
        *,
        chance: float = 0.0,
        journal_pages: int = 0,
        seed: int = 1,
    ) -> None:
        self.simulation, self.process, self.model, self.cluster = simulation, process, model, cluster
        self.n_stages = cluster.n_hosts
        self.network = Network(simulation, cluster)
        self.stages = [Stage(self, i) for i in range(self.n_stages)]
        self.core = EngineCore(
            limits,
            CoreSettings(
                max_queue=1 << 20, hold_s=60.0, journal_pages=journal_pages if cluster.copies else 0, validate=True
            ),
            0.0,
        )
        self.n_running = self.n_tokens = self.n_accepted = 0
        self._n_submitted_tokens = 0  # of requests that the supervisor has not got to yet
        self._random, self._chance = random.Random(seed), chance
        self._readers: dict[str, Callable[[TokenEvent | FinishedEvent], None]] = {}
        self._decoded: dict[int, Step] = {}
        drafter = ev.DrafterReady(self.n_stages - 1, with_output=True) if limits.speculation.drafter else None
        ready = ev.StagesReady(list(range(self.n_stages)), cluster.posted and self.n_stages > 1, False, drafter)
        self._execute(self.core.handle(ready, 0.0))

    # ---- the supervisor

    def candidate(self, tokens: TokenBuffer, *, by_load: bool) -> Candidate:
        """What a router sees of this replica; ``by_load``: without prefixes."""
        scheduler = self.core.scheduler
        n_cached = 0 if by_load or not scheduler.reuse.index.enabled else scheduler.reuse.index.match(tokens).position
        return Candidate(n_cached, scheduler.n_tokens_due + self._n_submitted_tokens, self.n_running)

    def submit(self, request: GenerationRequest, reader: Callable[[TokenEvent | FinishedEvent], None]) -> None:
        self._readers[request.request_id] = reader
        self.n_running += 1
        self._n_submitted_tokens += len(request.prompt)
        self.process.take(lambda: self._submit(request))

    def _submit(self, request: GenerationRequest) -> float:
        self._n_submitted_tokens -= len(request.prompt)
        return self._handle(lambda: ev.Submit(request), n_frames=0) + self._handle(ev.Tick, n_frames=0)

    def answer(self, stage: int, result: StepResult) -> None:
        """Send a stage's answer to the supervisor."""
        frame = encode(result, request_id=result.step_id)
        take = lambda: self.process.take(lambda: self._handle(lambda: self._read(frame), n_frames=1))  # noqa: E731
        self.network.send(stage, 0, len(frame), take)

    def send_copy(self, stage: int, n_bytes: int) -> None:
        """Send rows for the journal to the supervisor."""
        costs = self.process.costs
        seconds = costs.frame_s + n_bytes * costs.byte_s
        self.network.send(stage, 0, n_bytes, lambda: self.process.take(lambda: seconds))

    @staticmethod
    def _read(frame: bytes) -> ev.CoreEvent:
        view = memoryview(frame)
        header = parse_header(view[:HEADER_BYTES])
        message = decode(header, view[HEADER_BYTES:])
        assert isinstance(message, StepResult)
        return ev.StageAnswer(message)

    def _handle(self, event: Callable[[], ev.CoreEvent], n_frames: int) -> float:
        """Feed the core an event, carry out what it asks for, and return the CPU time of both."""
        costs, now = self.process.costs, self.simulation.now
        began = time.thread_time()
        instructions = self.core.handle(event(), now)
        seconds = time.thread_time() - began if costs.core_s is None else costs.core_s
        n_sent, n_events = self._count(instructions)
        seconds += costs.frame_s * (n_frames + n_sent) + costs.token_s * n_events
        self.simulation.at(now + seconds, lambda: self._execute(instructions))
        return seconds

    @staticmethod
    def _count(instructions: Sequence[ev.Instruction]) -> tuple[int, int]:
        """Frames and events among instructions."""
        n_sent = sum(type(one) is SendFrame for one in instructions)
        return n_sent, sum(len(one.events) for one in instructions if type(one) is ev.Deliver)

    def _execute(self, instructions: Sequence[ev.Instruction]) -> None:
        for one in instructions:
            if type(one) is SendFrame:
                self._send(one)
            elif type(one) is ev.Deliver:
                for request_id, event in one.events:
                    self._deliver(request_id, event)
            elif isinstance(one, ev.ReportPipelineFailure | ev.ReportDrafterFailure):
                raise SystemExit(f"the simulated pipeline failed: {one.failure.message}")
            elif not isinstance(one, FileRows | CopyRows | ev.StepFinished):  # rows are paid for as they come
                raise SystemExit(f"the simulator does not know {type(one).__name__}")

    def _deliver(self, request_id: str, event: TokenEvent | FinishedEvent) -> None:
        if isinstance(event, FinishedEvent):
            if event.error is not None:
                raise SystemExit(f"a simulated request failed: {event.error.message}")
            self.n_running -= 1
            self._readers.pop(request_id)(event)
            return
        self.n_tokens += 1
        self.n_accepted += event.drafted
        self._readers[request_id](event)

    def _send(self, sent: SendFrame) -> None:
        """Deliver a frame to a stage, decoded once for all stages."""
        view = memoryview(sent.frame)
        header = parse_header(view[:HEADER_BYTES])
        message = self._decoded.get(sent.step_id) if sent.stage < self.n_stages else None
        if message is None or sent.stage == 0:
            message = decode(header, view[HEADER_BYTES:])
            if isinstance(message, Step):
                self._decoded = {k: step for k, step in self._decoded.items() if k > sent.step_id - 1024}
                self._decoded[sent.step_id] = message
        stage = self.stages[min(sent.stage, self.n_stages - 1)]
        self.network.send(0, stage.index, len(sent.frame), lambda: stage.receive(message))

    # ---- the daemons

    def send_rows(self, stage: int, step_id: int, n_bytes: int) -> None:
        self.network.send(stage, stage + 1, n_bytes, lambda: self.stages[stage + 1].rows_arrived(step_id))

    def publish(self, step_id: int, n_tokens: int) -> None:
        """Send tokens or drafts from the last stage to the first one."""
        if self.n_stages > 1 and self.cluster.posted:
            arrived = lambda: self.stages[0].rows_arrived(step_id)  # noqa: E731
            self.network.send(self.n_stages - 1, 0, 16 * n_tokens, arrived)

    def sample(self, part: Slice) -> list[Sampled]:
        """Accept drafts by chance, up to the first that is wrong; then comes one token."""
        drafts = [DRAFT] * part.n_drafts if part.drafts_pend else part.drafts
        n = next((i for i in range(len(drafts)) if self._random.random() >= self._chance), len(drafts))
        return [Sampled(part.sequence, draft) for draft in drafts[:n]] + [Sampled(part.sequence, TOKEN)]


@dataclass
class Figures:
    """What a simulation found.  ``window_s``: simulated seconds that were measured."""

    tokens_per_s: float
    window_s: float
    token_s: float  # p50 between two tokens of a stream that did not come together
    first_token_s: list[float]
    supervisors: list[float]  # busy share
    stages: list[float]  # busy share of each stage of the first replica
    cpu_s_per_token: float
    cached: float = 0.0  # of prompt tokens
    steps_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0

    def line(self) -> str:
        first = statistics.median(self.first_token_s) if self.first_token_s else 0.0
        return (
            f"{self.tokens_per_s:9,.0f} tokens/s | {self.token_s * 1e3:7.2f} ms a token | "
            f"first {first * 1e3:8.1f} ms | supervisor {max(self.supervisors):4.0%} | "
            f"stages {statistics.mean(self.stages):4.0%} | "
            f"{self.cpu_s_per_token * 1e6:5.1f} us CPU a token | cached {self.cached:4.0%}"
        )


@dataclass(kw_only=True)
class Setup:
    """``n_replicas`` pipelines, dealt to ``n_supervisors`` processes.  ``speculation``: drafts a slice, at most."""

    model: Model = field(default_factory=Model)
    cluster: Cluster
    load: Load
    costs: Costs = field(default_factory=Costs)
    n_replicas: int = 1
    n_supervisors: int = 1
    drafts: int = 0
    fixed_drafts: bool = True
    chance: float = 0.0
    chunk: int = 1024
    slots: int = 0
    by_load: bool = False  # the router does not look at prefixes
    journal_pages: int = 1 << 14
    seed: int = 1


def limits_of(setup: Setup) -> EngineLimits:
    load = setup.load
    context = load.system + load.turns * (load.prompt + load.answer) + 4 * PAGE_TOKENS
    most = max(1, math.ceil(load.streams / setup.n_replicas) + (load.streams if setup.n_replicas > 1 else 0))
    speculation = SpeculationSettings(
        max_drafts=setup.drafts, drafter=setup.drafts > 0, fixed=setup.fixed_drafts and setup.drafts > 0
    )
    pages = most * (context // PAGE_TOKENS + 2)
    prefix = PrefixSettings()
    if setup.slots:
        prefix = PrefixSettings(max_slots=setup.slots, memory_bytes=1 << 50, unit_bytes={KvGroup.FULL: 1})
        pages += pages // 2
    return EngineLimits(
        max_sequences=most,
        max_context=context,
        prefill_chunk=setup.chunk,
        max_step_tokens=setup.chunk + most * (1 + setup.drafts),
        kv_groups=frozenset({KvGroup.FULL}),
        pools=PoolSizes(pages, 0, 0),
        prefix=prefix,
        speculation=speculation,
    )


class Client:
    """One request after the other."""

    def __init__(self, run: Run, index: int) -> None:
        self.run, self.index, self._turn, self._n = run, index, 0, 0
        self._random = random.Random(f"{run.setup.seed} {index}")
        self._tokens: list[int] = []
        self.first_at = self.last_at = 0.0
        self.n_tokens = 0

    def begin(self) -> None:
        run, load = self.run, self.run.setup.load
        if self._turn % load.turns == 0:
            self._tokens = [*run.systems[self._random.randrange(load.n_systems)]] if load.system else []
        self._tokens += [self._random.randrange(1, 1 << 16) for _ in range(load.prompt)]
        self._turn += 1
        self._n += 1
        request = GenerationRequest(
            request_id=f"{self.index}-{self._n}",
            prompt=TokenBuffer(self._tokens),
            max_tokens=load.answer,
            sampling=SamplingParams(temperature=0.0),
        )
        self._sent_at, self._waits = run.simulation.now, True
        run.replicas[run.choose(request.prompt)].submit(request, self._on_event)

    def _on_event(self, event: TokenEvent | FinishedEvent) -> None:
        run, now = self.run, self.run.simulation.now
        if isinstance(event, FinishedEvent):
            run.finished(event)
            think_s = run.setup.load.think_s
            pause_s = self._random.expovariate(1 / think_s) if think_s else 0.0
            run.simulation.at(now + pause_s, self.begin)
            return
        self._tokens.append(event.token)
        self.n_tokens += 1
        if self._waits:
            self._waits = False
            run.first_token(now - self._sent_at)
        elif run.measuring and now > self.last_at:
            run.gaps.append(now - self.last_at)
        self.last_at = now


class Run:
    """A simulation of a setup."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.simulation = setup, Simulation()
        self.processes = [Process(self.simulation, setup.costs) for _ in range(setup.n_supervisors)]
        limits = limits_of(setup)
        self.replicas = [
            Replica(
                self.simulation,
                self.processes[i % setup.n_supervisors],
                setup.model,
                setup.cluster,
                limits,
                chance=setup.chance,
                journal_pages=setup.journal_pages,
                seed=setup.seed + i,
            )
            for i in range(setup.n_replicas)
        ]
        self._router = Router([str(i) for i in range(setup.n_replicas)])
        for name in self._router.health:
            self._router.health[name] = Health.SERVING
        some = random.Random(f"systems {setup.seed}")
        self.systems = [
            [some.randrange(1, 1 << 16) for _ in range(setup.load.system)] for _ in range(setup.load.n_systems)
        ]
        self.clients = [Client(self, i) for i in range(setup.load.streams)]
        self.measuring = False
        self.gaps: list[float] = []
        self.first_tokens: list[float] = []
        self.n_started = self.n_finished = self.n_generated = self.n_cached = self.n_prompt = 0

    def choose(self, prompt: TokenBuffer) -> int:
        """Return where a request goes, as the router of replicas decides."""
        if len(self.replicas) == 1:
            return 0
        by_load = self.setup.by_load
        candidates = {str(i): replica.candidate(prompt, by_load=by_load) for i, replica in enumerate(self.replicas)}
        chosen = self._router.order(len(prompt), candidates)[0]
        self._router.on_routed(chosen)
        return int(chosen)

    def first_token(self, seconds: float) -> None:
        self.n_started += 1
        if self.measuring:
            self.first_tokens.append(seconds)

    def finished(self, event: FinishedEvent) -> None:
        self.n_finished += 1
        self.n_generated += event.usage.generated_tokens
        if self.measuring:
            self.n_cached += event.usage.cached_tokens
            self.n_prompt += event.usage.prompt_tokens

    def measure(self, n_tokens: int = 0, n_requests: int = 0) -> Figures:
        """Decoding streams, from when all have their first token until ``n_tokens`` have come, or until the first
        answer ends; or ``n_requests`` more than the clients that all have answered once."""
        for client in self.clients:
            self.simulation.at(0.0, client.begin)
        gc.collect()
        gc.freeze()
        if n_requests:
            self.simulation.run(lambda: self.n_finished >= len(self.clients))
        else:
            self.simulation.run(lambda: self.n_started >= len(self.clients))
        return self._window(n_tokens, n_requests)

    def _window(self, n_tokens: int, n_requests: int) -> Figures:
        total = lambda: sum(one.n_tokens for one in self.replicas)  # noqa: E731
        steps = lambda: sum(one.stages[0].n_steps for one in self.replicas)  # noqa: E731
        busy = [one.busy_s for one in self.processes]
        stages = [stage.busy_s for stage in self.replicas[0].stages]
        began, n_before, n_steps, n_finished = self.simulation.now, total(), steps(), self.n_finished
        self.measuring = True
        if n_requests:
            self.simulation.run(lambda: self.n_finished - n_finished >= n_requests)
        else:
            self.simulation.run(lambda: (n_tokens and total() - n_before >= n_tokens) or self.n_finished > n_finished)
        seconds, made = self.simulation.now - began, total() - n_before
        cpu = [one.busy_s - before for one, before in zip(self.processes, busy, strict=True)]
        return Figures(
            made / seconds,
            seconds,
            statistics.median(self.gaps) if self.gaps else 0.0,
            self.first_tokens,
            [min(1.0, one / seconds) for one in cpu],
            [(one.busy_s - before) / seconds for one, before in zip(self.replicas[0].stages, stages, strict=True)],
            sum(cpu) / max(1, made),
            self.n_cached / max(1, self.n_prompt),
            (steps() - n_steps) / seconds,
            self.n_prompt / seconds,
        )


def simulate_decode(setup: Setup, rounds: int = 40) -> Figures:
    """Streams that all decode, for about so many rounds."""
    tokens = accepted_tokens(setup.drafts, setup.chance)
    answer = round(tokens * (2 * rounds + 8 * setup.cluster.n_hosts)) + setup.load.streams // 8
    load = replace(setup.load, answer=answer)
    return Run(replace(setup, load=load)).measure(n_tokens=round(rounds * tokens * load.streams))


def simulate_prompt(setup: Setup, n_tokens: int) -> float:
    """Seconds until the first token of a prompt that is alone."""
    run = Run(replace(setup, load=Load(streams=1, prompt=n_tokens, answer=2)))
    run.measuring = True
    run.clients[0].begin()
    run.simulation.run(lambda: bool(run.first_tokens))
    return run.first_tokens[0]


# ---- measured beside simulated

CELL = {
    "hosts": 2, "stage_s": 8e-3, "row_s": 1e-4, "streams": [1, 4, 8], "answer": 80, "rounds": 4, "chunk": 512,
    "chunks": 8,
}  # fmt: skip
LINKS = (("shared_memory", None), ("tcp", None), ("tcp", 0.1e-3), ("tcp", 1e-3), ("tcp", 10e-3))
"""Transport, and the latency of a link in place of loopback; None: none."""


def run_cell(model: Path, cell: dict, latency_s: float | None) -> dict:
    """Run scale_paced.py, behind a slow link if there is a latency."""
    command = [sys.executable, str(Path(__file__).with_name("scale_paced.py")), str(model), json.dumps(cell)]
    with tempfile.TemporaryFile("w+") as out:
        if latency_s is None:
            status = subprocess.run(command, stdout=out, check=False).returncode
        else:
            status = slow_link.run(command, latency_s, stdout=out)
        out.seek(0)
        text = out.read()
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return json.loads(text.splitlines()[-1])


def best_round(found: dict, name: str) -> int:
    """The round that other work on this machine disturbed least."""
    if name == "prompt":
        per_round = len(found["prompt_s"]) // len(found["stage_s"][name])
        return found["prompt_s"].index(min(found["prompt_s"])) // per_round
    return found["decode"][name].index(max(found["decode"][name]))


def compare(found: dict, cell: dict, hop_s: float, wake_s: float) -> list[dict]:
    """What was measured beside what is simulated with stages as long as the daemons say that theirs were.

    ``hop_s``: what a hop takes here without a network.  ``wake_s``: the part of a round trip that is in it already.
    """
    n = cell["hosts"]
    latency_s = max(0.0, (found["round_trip_s"] - wake_s) / 2) if cell["transport"] == "tcp" else 0.0
    bytes_per_s = math.inf
    if cell["transport"] == "tcp":
        bytes_per_s = cell["chunk"] * Model.row_bytes / max(1e-6, found["chunk_s"][0] - found["round_trip_s"])
    cluster = Cluster(
        n_hosts=n, latency_s=latency_s, bytes_per_s=bytes_per_s, hop_s=hop_s, copies=cell["transport"] == "tcp"
    )
    rows = []
    for name, lists in found["stage_s"].items():
        stages = lists[best_round(found, name)]
        model = Model(
            first_s=sum(stages), row_s=0.0, chunk_s=math.inf, stage_s=0.0, shares=tuple(s / sum(stages) for s in stages)
        )
        setup = Setup(model=model, cluster=cluster, load=Load(streams=1), chunk=cell["chunk"])
        if name == "prompt":
            n_tokens = cell["chunk"] * cell["chunks"]
            measured = 1 / min(found["prompt_s"])
            simulated = 1 / simulate_prompt(setup, n_tokens)
            formula = 1 / predict_prompt(model, cluster, n_tokens, cell["chunk"]).round_s
        else:
            streams = int(name)
            measured = max(found["decode"][name])
            setup = replace(setup, load=Load(streams=streams))
            simulated = simulate_decode(setup).tokens_per_s
            formula = predict_decode(model, cluster, streams).tokens_per_s
        rows.append({"case": name, "measured": measured, "simulated": simulated, "formula": formula})
    return rows


def measure(options: argparse.Namespace) -> dict:
    """Paced daemons by each link and number of hosts."""
    cells, results = [dict(CELL, hosts=hosts) for hosts in options.hosts], []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "wide.gguf"
        write(model, wide_model())
        for cell in cells:
            hop_s = wake_s = 0.0
            for transport, latency_s in LINKS:
                cell = cell | {"transport": transport}
                found = run_cell(model, cell, latency_s)
                if transport == "shared_memory":  # what a hop takes here: a message, and a thread that wakes up
                    stages = sum(found["stage_s"]["1"][best_round(found, "1")])
                    hop_s = (1 / max(found["decode"]["1"]) - stages) / cell["hosts"]
                    wake_s = found["round_trip_s"]
                rows = compare(found, cell, hop_s, wake_s)
                link = transport if latency_s is None else f"tcp, {latency_s * 1e3:g} ms"
                print(
                    f"{cell['hosts']} hosts, {link}: round trip {found['round_trip_s'] * 1e3:.2f} ms, "
                    f"5 MiB {found['chunk_s'][0] * 1e3:.1f} ms (first {found['chunk_s'][1] * 1e3:.1f}), "
                    f"hop {hop_s * 1e6:.0f} us, load {found['load']:.1f}"
                )
                for row in rows:
                    print(
                        f"    {row['case']:>8}: measured {row['measured']:8.2f}, simulated {row['simulated']:8.2f} "
                        f"({row['simulated'] / row['measured'] - 1:+.1%}), formula {row['formula']:8.2f} "
                        f"({row['formula'] / row['measured'] - 1:+.1%})",
                        flush=True,
                    )
                results.append({"link": link, **cell, "hop_s": hop_s, "found": found, "rows": rows})
    return {"conditions": machine(), "cells": results}


# ---- tables

NETWORKS = {
    "one host": Cluster(n_hosts=1, latency_s=0.0, bytes_per_s=math.inf, hop_s=2e-6, copies=False),
    "100 Gbit/s, 20 us": Cluster(n_hosts=1, latency_s=20e-6, bytes_per_s=12.5e9),
    "10 Gbit/s, 100 us": Cluster(n_hosts=1, latency_s=0.1e-3, bytes_per_s=1.25e9),
    "1 Gbit/s, 200 us": Cluster(n_hosts=1, latency_s=0.2e-3, bytes_per_s=0.125e9),
    "10 Gbit/s, 1 ms": Cluster(n_hosts=1, latency_s=1e-3, bytes_per_s=1.25e9),
    "10 Gbit/s, 10 ms": Cluster(n_hosts=1, latency_s=10e-3, bytes_per_s=1.25e9),
}
CORE_S = 19e-6
"""CPU time of the core for an answer and what follows it, for the formula."""


def predict(options: argparse.Namespace) -> dict:
    """Formulas beside simulations, decode and prompts, by network and hosts."""
    costs, rows = Costs(core_s=CORE_S, token_s=7e-6), []
    for name, network in NETWORKS.items():
        for hosts in options.hosts if name != "one host" else [1]:
            cluster = replace(network, n_hosts=hosts)
            for streams, drafts in ((1, 0), (1, 3), (64, 0), (256, 0)):
                setup = Setup(cluster=cluster, load=Load(streams=streams), drafts=drafts, chance=0.8 if drafts else 0.0)
                found = simulate_decode(setup)
                formula = predict_decode(setup.model, cluster, streams, drafts=drafts, chance=setup.chance, costs=costs)
                case = f"{streams} streams" + (f", {drafts} drafts" if drafts else "")
                rows.append((name, hosts, case, formula.tokens_per_s, found.tokens_per_s, formula.limit))
            n_tokens = 65_536
            formula = predict_prompt(Model(), cluster, n_tokens, options.chunk, costs=costs)
            seconds = simulate_prompt(Setup(cluster=cluster, load=Load(streams=1), chunk=options.chunk), n_tokens)
            rows.append((name, hosts, f"prompt of {n_tokens}", formula.tokens_per_s, n_tokens / seconds, formula.limit))
    keys = ("network", "hosts", "case", "formula", "simulated", "limit")
    for name, hosts, case, by_formula, simulated, limit in rows:
        share = simulated / by_formula - 1
        print(f"{name:18} | {hosts:2} | {case:19} | {by_formula:9,.0f} | {simulated:9,.0f} | {share:+6.1%} | {limit}")
    return {"conditions": machine(), "rows": [dict(zip(keys, row, strict=True)) for row in rows]}


def simulate(options: argparse.Namespace) -> dict:
    """One setup."""
    cluster = Cluster(
        n_hosts=options.hosts, latency_s=options.latency_ms / 1e3, bytes_per_s=options.mbyte_s * 1e6,
        copies=not options.no_journal,
    )  # fmt: skip
    costs = Costs(token_s=Costs.token_s + (HTTP_TOKEN_S if options.http else 0.0))
    load = Load(
        streams=options.streams, prompt=options.prompt, answer=options.answer, turns=options.turns,
        system=options.system, n_systems=options.systems, think_s=options.think_s,
    )  # fmt: skip
    setup = Setup(
        cluster=cluster, load=load, costs=costs, n_replicas=options.replicas, n_supervisors=options.supervisors,
        drafts=options.drafts, chance=options.chance, chunk=options.chunk, by_load=options.by_load,
        slots=4 * options.streams if options.turns > 1 or options.system else 0,
    )  # fmt: skip
    found = Run(setup).measure(n_requests=options.requests) if options.requests else simulate_decode(setup)
    print(found.line())
    return {"conditions": machine(), "setup": repr(setup), "figures": asdict(found)}


def saturate(options: argparse.Namespace) -> dict:
    """Pipelines of some hosts each, more and more of them: behind one supervisor, then one each."""
    rows = []
    for http in (False, True):
        costs = Costs(token_s=Costs.token_s + (HTTP_TOKEN_S if http else 0.0))
        for replicas in options.replicas:
            for supervisors in dict.fromkeys((1, replicas)):
                setup = Setup(
                    cluster=Cluster(n_hosts=options.hosts), load=Load(streams=options.streams * replicas), costs=costs,
                    n_replicas=replicas, n_supervisors=supervisors,
                )  # fmt: skip
                began = time.perf_counter()
                found = simulate_decode(setup, rounds=12)
                print(
                    f"{'HTTP' if http else 'core'} | {replicas * options.hosts:2} hosts, {replicas:2} pipelines, "
                    f"{supervisors:2} supervisors, {setup.load.streams:6,} streams | {found.line()} | "
                    f"{time.perf_counter() - began:.0f} s",
                    flush=True,
                )
                rows.append(
                    {"http": http, "replicas": replicas, "supervisors": supervisors, "hosts": replicas * options.hosts,
                     "streams": setup.load.streams, **asdict(found)}
                )  # fmt: skip
    return {"conditions": machine(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    predicting.add_argument("--chunk", type=int, default=1024)
    predicting.add_argument("--json", type=Path)
    simulating = commands.add_parser("simulate")
    for name, default in (("hosts", 4), ("streams", 64), ("replicas", 1), ("supervisors", 1), ("prompt", SHORT_PROMPT),
                          ("answer", 128), ("turns", 1), ("system", 0), ("systems", 1), ("drafts", 0), ("chunk", 1024),
                          ("requests", 0)):  # fmt: skip
        simulating.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("latency-ms", 0.1), ("mbyte-s", 1250.0), ("chance", 0.8), ("think-s", 0.0)):
        simulating.add_argument(f"--{name}", type=float, default=default)
    for name, text in (("http", "tokens are streamed over HTTP"), ("no-journal", "recovery.journal = 0"),
                       ("by-load", "the router looks at loads alone")):  # fmt: skip
        simulating.add_argument(f"--{name}", action="store_true", help=text)
    simulating.add_argument("--json", type=Path)
    saturating = commands.add_parser("saturate")
    saturating.add_argument("--hosts", type=int, default=4, help="of a pipeline")
    saturating.add_argument("--streams", type=int, default=160, help="of a pipeline")
    saturating.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    saturating.add_argument("--json", type=Path)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--hosts", type=int, nargs="+", default=[2, 3])
    measuring.add_argument("--json", type=Path)
    options = parser.parse_args()
    commands_ = {"predict": predict, "simulate": simulate, "saturate": saturate, "measure": measure}
    record = commands_[options.command](options)
    if options.json is not None:
        write_json(options.json, record)


if __name__ == "__main__":
    main()
