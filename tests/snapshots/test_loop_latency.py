"""Prompts of 262,144 tokens never hold the event loop, from submit to eviction, with snapshots on.

No callback executes as many lines as a prompt has tokens: pages are walked, tokens are not.  Lines are counted,
since a limit in milliseconds tells more of the machine than of the code.  What C code does in one line is limited by
time: no callback takes as long as one and a half plain loops over a prompt, measured right before and after it on the
same thread.

The daemon only draws tokens: the toy model of tests/engine would take minutes for prompts of this length.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from pathlib import Path

import pytest

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import FinishedEvent, GenerationRequest
from lucevisor.engine.shell import Engine, EngineSettings
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.kv_transfer.transfers import KvTransfer
from lucevisor.model.spec import LayerSpec, StateTensor, attention_state
from lucevisor.model.values import Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Sampled, SamplingParams, StepResult
from lucevisor.snapshots.file_format import SlotRecord, StateModel
from lucevisor.snapshots.manager import SnapshotManager
from lucevisor.snapshots.policy import SavePolicy
from lucevisor.snapshots.store import SnapshotStore
from tests.costs import lines_of, loop_s
from tests.engine.toy_pipeline import ToyDaemon, ToyLimits
from tests.snapshots.snapshot_parts import save

N = 262_144
MOST_LINES = (
    N  # 61,000 to 166,000 as of writing: pages are walked up to 40 times when a prompt ends and displaces another
)
MOST_LOOPS = 1.5  # over the prompt
TRIES = 4  # page faults of a busy machine count as time of the thread
PAGES = N // 64
LAYERS = {
    frozenset({KvGroup.FULL}): (LayerSpec(0, KvGroup.FULL, {}, attention_state(1, 1, 1)),),
    frozenset({KvGroup.FULL, KvGroup.RECURRENT}): (
        LayerSpec(0, KvGroup.FULL, {}, attention_state(1, 1, 1)),
        LayerSpec(1, KvGroup.RECURRENT, {}, (StateTensor("delta", (2, 4), Dtype.FLOAT32),)),
    ),
}


class CallbackCosts:
    """What every callback of the loop cost its thread: seconds, or lines of Python if they are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[float, str]] = []
        self.counts_lines = False
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            if self.counts_lines:
                cost: float = lines_of(lambda: run(handle))
            else:
                started = time.thread_time()
                run(handle)
                cost = time.thread_time() - started
            self.seen.append((cost, repr(handle)))

        monkeypatch.setattr(asyncio.Handle, "_run", timed)


def text(seed: int, n: int = N) -> TokenBuffer:
    rng = random.Random(seed)
    return TokenBuffer([rng.randrange(150_000) for _ in range(n)])


class DrawingDaemon(ToyDaemon):
    """Answers every step at once and computes nothing."""

    def run_one(self) -> tuple[StepResult, memoryview]:
        stage, step = self.inbox.popleft()
        sampled = [Sampled(piece.sequence, 7) for piece in step.slices if piece.sample]
        return StepResult(step.step_id, stage, sampled, compute_s=0.25, wait_s=0.5), memoryview(b"")


class Rig:
    """An engine over one daemon that draws."""

    def __init__(self, limits: EngineLimits) -> None:
        self.engine = Engine(limits, EngineSettings(max_queue=10))
        self.daemon = DrawingDaemon({}, ToyLimits(1, limits.max_sequences, limits.max_step_tokens))
        self.engine.attach([self.daemon])

    async def generate(self, name: str, prompt: TokenBuffer) -> FinishedEvent:
        request = GenerationRequest(request_id=name, prompt=prompt, max_tokens=2, sampling=SamplingParams(seed=1))
        with self.engine.submit(request) as handle:
            async for event in handle:
                if isinstance(event, FinishedEvent):
                    return event
        raise AssertionError("no end")

    async def work(self) -> None:
        """Let the daemon answer, one step in a turn of the loop."""
        while True:
            await asyncio.sleep(0 if self.daemon.inbox else 0.001)
            if self.daemon.inbox:
                self.engine.receive(*self.daemon.run_one())


@pytest.fixture
def quiet() -> None:
    """As in a running supervisor: what exists at the start is not collected again."""
    gc.collect()
    gc.freeze()


def prepare(kv_groups: frozenset[KvGroup], directory: Path) -> tuple[SnapshotStore, TokenBuffer, TokenBuffer]:
    """A store with one long prompt, that prompt, and another one."""
    model = StateModel("ab" * 32, "toy", "Toy", Dtype.FLOAT32, Dtype.FLOAT32, LAYERS[kv_groups])
    store = SnapshotStore(directory, model, 1 << 30)
    on_disk = text(1)
    save(store, SlotRecord(on_disk, 100.0))
    return store, on_disk, text(2)


async def converse(kv_groups: frozenset[KvGroup], directory: Path) -> dict[str, int]:
    """A long prompt comes, continues, is displaced, and another one is on disk; return cached tokens by request."""
    store, on_disk, cold = await asyncio.to_thread(prepare, kv_groups, directory)
    limits = EngineLimits(
        max_sequences=2,
        max_context=N + 4096,
        prefill_chunk=2048,
        max_step_tokens=2050,
        kv_groups=kv_groups,
        pools=PoolSizes(full_pages=3 * PAGES, window_pages=0, states=6),
        prefix=PrefixSettings(max_slots=2, memory_bytes=1 << 40, unit_bytes=dict.fromkeys(kv_groups, 1)),
    )
    rig = Rig(limits)
    transfers = KvTransfer({"g": [LayerRange(0, 2)]})  # no daemon is ready: files are opened, checked and given up
    manager = SnapshotManager(rig.engine, lambda: transfers, SavePolicy(256, 1 << 30), None)
    manager.start()
    manager.use(store)
    more, longer = TokenBuffer(cold), TokenBuffer(on_disk)
    longer.append(5)
    for token in range(500):
        more.append(token)
    cached = {}
    work = asyncio.create_task(rig.work())
    async with asyncio.timeout(60):
        for name, prompt in (("cold", cold), ("warm", more), ("on disk", longer), ("again", more)):
            cached[name] = (await rig.generate(name, prompt)).usage.cached_tokens
        await manager.save_all(5.0)
        await manager.close()
    work.cancel()
    failures = store.statistics.failures
    assert failures["not_restored"] >= 1, failures
    assert failures["aborted"] >= 1, failures
    return cached


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kv_groups", LAYERS, ids=["full", "recurrent"])
async def test_262144_tokens(
    kv_groups: frozenset[KvGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    costs, prompt = CallbackCosts(monkeypatch), text(3)

    async def most(name: str) -> tuple[float, str]:
        await asyncio.sleep(0)
        costs.seen.clear()
        cached = await converse(kv_groups, tmp_path / name)
        assert cached["cold"] == cached["on disk"] == 0
        assert cached["warm"] >= N - 64
        return max(costs.seen)

    costs.counts_lines = True
    n_lines, handle = await most("lines")
    assert n_lines <= MOST_LINES, handle
    costs.counts_lines = False
    seen = []
    for attempt in range(TRIES):
        before_s = loop_s(prompt)
        slowest_s, handle = await most(str(attempt))
        whole_s = max(before_s, loop_s(prompt))
        seen.append((slowest_s, whole_s, handle))
        if slowest_s <= MOST_LOOPS * whole_s:
            return
    raise AssertionError(f"the slowest callback of each try, and a loop over the prompt, in seconds: {seen}")
