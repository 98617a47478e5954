"""A scheduler on a pipeline whose steps take simulated time: a virtual clock, no threads, the same result every time.

A stage takes ``overhead_s + tokens * (token_s + position * depth_s)`` for a step and works on one at a time, in order.
``rows_s`` gives what a step of so many rows takes in place of overhead and tokens, for kernels that go by size.
The defaults are those measured on one core of an EPYC (Zen 4) with the demo model, two groups.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import quantiles

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import FinishedEvent
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import RequestRecord, SwappedPrefix
from lucevisor.engine.step import StepPlan
from lucevisor.kv.prefix_cache import PrefixIndex, Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Sampled, Step, StepResult
from tests.engine.toy_engine import HYBRID, request

STOP = 5
"""The id that ends an answer."""


def gpu_rows_s(n_stages: int = 1) -> Callable[[int], float]:
    """What a 27B model takes on a GPU, on each of ``n_stages``, if its kernels are what limits it.

    Up to 64 rows weights are multiplied as they are packed; above, all are dequantised.
    """

    def seconds(n_rows: int) -> float:
        if n_rows <= PAGE_TOKENS:
            return (0.0105 + 0.0004 * n_rows) / n_stages
        return max(0.075 + 0.00004 * n_rows, 0.045 + 0.0001 * n_rows) / n_stages

    return seconds


def h200_rows_s(n_stages: int = 1) -> Callable[[int], float]:
    """What it took on an H200: 16 tokens are one CUDA graph; from there to some 600, launching limits."""

    def seconds(n_rows: int) -> float:
        if n_rows <= 16:
            return 0.017 / n_stages
        return max(0.066 + 0.000016 * n_rows, 0.022 + 0.000091 * n_rows) / n_stages

    return seconds


def demo_limits(**changes: object) -> EngineLimits:
    """What the planner gives the demo model."""
    usual: dict[str, object] = {
        "max_sequences": 8,
        "max_context": 8192,
        "prefill_chunk": 512,
        "max_step_tokens": 520,
        "long_prefill_tokens": 128,
        "spaces": HYBRID,
        "pools": PoolSizes(full_pages=1024, window_pages=0, states=9),
    }
    return EngineLimits(**{**usual, **changes})  # type: ignore[arg-type]


def gpu_limits(prefill_chunk: int) -> EngineLimits:
    """What the planner gives a 27B model on a GPU with room."""
    pools = PoolSizes(full_pages=4096, window_pages=0, states=9)
    return demo_limits(
        prefill_chunk=prefill_chunk, max_step_tokens=prefill_chunk + 8, max_context=32768, pools=pools,
        long_prefill_tokens=512,
    )  # fmt: skip


@dataclass
class RequestTrace:
    """What one request saw, in seconds of the virtual clock."""

    name: str
    n_prompt: int
    submitted_at: float
    n_answer: int
    n_drawn: int = 0
    started_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None

    def draw(self) -> int:
        """The next token of its answer."""
        self.n_drawn += 1
        return STOP if self.n_drawn == self.n_answer else 7

    @property
    def first_s(self) -> float:
        assert self.first_at is not None, f"{self.name} has no token"
        return self.first_at - self.submitted_at


class KeptSlots:
    """Swap space of a scheduler with pages enough: a preempted request's slot stays where it is."""

    n_writing = 0

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def write(self, slot: PrefixSlot) -> SwappedPrefix | None:
        self._index.unpin(slot)
        return SwappedPrefix(slot.n_tokens, slot.paged_out)

    def read(self, record: RequestRecord, swapped: SwappedPrefix, reservation: Reservation) -> None:
        raise AssertionError(f"the slot of {record.request.request_id} has gone")

    def drop(self, swapped: SwappedPrefix) -> None:
        pass


@dataclass
class TimedPipeline:
    """``at(when, action)`` runs an action at a time; ``run(until)`` lets time pass."""

    limits: EngineLimits = field(default_factory=demo_limits)
    n_stages: int = 2
    overhead_s: float = 0.008
    token_s: float = 0.000385
    depth_s: float = 0.0
    rows_s: Callable[[int], float] | None = None
    outside_s: float = 0.0  # of the time to the first token: HTTP and tokenising
    max_queue: int = 10**6
    swaps: bool = False  # preempted requests go on from prefix slots
    jitter: float = 0.0  # a stage takes up to this share more or less
    now: float = 0.0
    traces: dict[str, RequestTrace] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by client

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, self.n_stages)
        self.scheduler.attach(self.n_stages, has_doorbells=True)  # as daemons of one stage each
        if self.swaps:
            self.scheduler.preemption.swap = KeptSlots(self.scheduler.reuse.index)
        self._free_at = [0.0] * self.n_stages
        self._ends_at: dict[int, float] = {}  # by step
        self._in_flight: deque[tuple[float, StepPlan, float]] = deque()
        self._actions: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._on_end: dict[str, Callable[[], None]] = {}
        self._rng = random.Random(0)

    def submit(
        self,
        name: str,
        n_prompt: int,
        n: int,
        *,
        n_answer: int | None = None,
        key: str = "",
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Ask for at most ``n`` tokens; the model stops after ``n_answer``."""
        first = next(self._number)  # no two prompts alike
        prompt = [first, *range(n_prompt - 1)]
        asked = request(name, prompt, n, client_id=key, stop_ids=frozenset({STOP}))
        if not self.scheduler.accepts(asked, self.max_queue):
            self.refused[key] += 1
            if on_end is not None:
                on_end()
            return
        self.traces[name] = RequestTrace(name, n_prompt, self.now, n_answer or n)
        if on_end is not None:
            self._on_end[name] = on_end
        self.scheduler.submit(asked, self.now)

    def at(self, when: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._actions, (when, next(self._number), action))

    def client(self, name: str, n_prompt: int, n: int, pause_s: float, start_s: float, key: str = "") -> None:
        """Ask, read the answer, pause for about so long, ask again, for ever."""
        numbers, rng = itertools.count(), random.Random(name)

        def ask() -> None:
            self.submit(f"{name}-{next(numbers)}", n_prompt, n, key=key, on_end=again)

        def again() -> None:
            self.at(self.now + pause_s * rng.uniform(0.5, 1.5), ask)

        self.at(start_s, ask)

    def run(self, until: float = 1e9) -> None:
        while True:
            self._send()
            times = [self._in_flight[0][0]] if self._in_flight else []
            times += [self._actions[0][0]] if self._actions else []
            if not times or min(times) > until:
                self.now = max(self.now, min(until, 1e8)) if until < 1e9 else self.now
                return
            self.now = min(times)
            if self._in_flight and self._in_flight[0][0] == self.now:
                _, plan, slowest_s = self._in_flight.popleft()
                self._answer(plan, slowest_s)
            else:
                heapq.heappop(self._actions)[2]()

    def step_s(self, step: Step) -> float:
        """What a stage takes for a step, without jitter."""
        n_rows = step.n_tokens
        flat_s = self.overhead_s + n_rows * self.token_s if self.rows_s is None else self.rows_s(n_rows)
        return flat_s + self.depth_s * sum(len(s.tokens) * (s.start + len(s.tokens) / 2) for s in step.slices)

    def _send(self) -> None:
        while (plan := self.scheduler.next_plan(self.now)) is not None:
            done_at = max(self.now, self._ends_at.get(plan.step.depends_on_step, 0.0))  # its tokens are known then
            seconds, slowest_s = self.step_s(plan.step), 0.0
            for stage, free_at in enumerate(self._free_at):
                share = 1 + self.jitter * self._rng.uniform(-1, 1)
                done_at = self._free_at[stage] = max(done_at, free_at) + seconds * share
                slowest_s = max(slowest_s, seconds * share)
            self._in_flight.append((done_at, plan, slowest_s))
            self._ends_at[plan.step.step_id] = done_at
            if self.n_stages > 1:
                self.at(self._free_at[0], lambda: self.scheduler.on_first_stage_done())
            self.plans.append(plan)

    def _answer(self, plan: StepPlan, slowest_s: float) -> None:
        drawn = [
            Sampled(s.sequence, self.traces[name].draw())
            for name, s in zip(plan.request_ids, plan.step.slices, strict=True)
            if s.sample
        ]
        events = self.scheduler.apply(StepResult(plan.step.step_id, 0, drawn), self.now)
        for name, event in events:
            trace = self.traces[name]
            trace.first_at = self.now + self.outside_s if trace.first_at is None else trace.first_at
            if isinstance(event, FinishedEvent):
                trace.ended_at, trace.started_at = self.now, trace.submitted_at + event.timings.queue_s
                if (on_end := self._on_end.pop(name, None)) is not None:
                    on_end()

    def first_token_s(self, prefix: str, after: float = 0.0) -> list[float]:
        """Times to the first token of requests named so, that were submitted from then on."""
        return [
            trace.first_s
            for name, trace in self.traces.items()
            if name.startswith(prefix) and after <= trace.submitted_at and trace.first_at is not None
        ]


def p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1]
