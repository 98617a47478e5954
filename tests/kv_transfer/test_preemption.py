"""Preempted requests, whose state goes to host memory and back while anything happens: no token changes.

The real host tier and its manager over toy daemons, whose transfers end when a test lets them.  The same over a whole
service: tests/e2e/test_preemption.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import GenerationRequest
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.kv_transfer.host_tier import HostTier
from lucevisor.kv_transfer.transfers import Transfer, TransferFile
from lucevisor.model.pages import ResidencyPolicy, max_window_pages
from lucevisor.model.spec import LayerSpec, StateTensor
from lucevisor.model.values import Dtype, KvGroup
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.messages import SlotPlace
from lucevisor.protocol.steps import SamplingParams
from lucevisor.snapshots.manager import SnapshotManager
from lucevisor.snapshots.policy import SavePolicy
from tests.engine.test_outputs import Play, Scenario, lookups
from tests.engine.test_recovery import freeze
from tests.engine.toy_drafter import ToyDrafter
from tests.engine.toy_engine import ALL_KV_GROUPS, HYBRID, ToyEngine, check_answers, events_of, limits, request, told
from tests.engine.toy_pipeline import ToyConstraint, ToyDaemon, ToyStage, Violation

Page = list[tuple[int, int]]


@dataclass
class _Held:
    """What one stage wrote: its pages by KV group, its state, and what a drafter knows of that state."""

    pages: dict[KvGroup, list[Page]]
    state: int
    after: tuple[int, int]


@dataclass
class _Pending:
    saves: bool
    units: Sequence[tuple[TransferFile, SlotPlace]]
    with_draft: bool
    end: asyncio.Future[Transfer]
    links: list[ToyDaemon]
    drafter: ToyDrafter | None


class ToyTransfers:
    """``KvTransfer`` over the daemons of a toy engine."""

    def __init__(self, toy: ToyEngine) -> None:
        self._toy = toy
        self._held: dict[tuple[int, int], _Held] = {}  # by file and stage
        self.pending: list[_Pending] = []
        self.n_saved = self.n_restored = 0

    def save(self, units: Sequence[tuple[TransferFile, SlotPlace]]) -> asyncio.Future[Transfer]:
        return self._begin(units, saves=True)

    def load(self, units: Sequence[tuple[TransferFile, SlotPlace]]) -> asyncio.Future[Transfer]:
        return self._begin(units, saves=False)

    def do(self, index: int, problem: str = "") -> None:
        """Let one transfer end, as failed if there is a ``problem``."""
        one = self.pending.pop(index % len(self.pending))
        done = Transfer()
        alive = all(link in self._toy.daemons for link in one.links) and bool(one.links)
        done.problem = problem or ("" if alive else "group left was lost")
        if not done.problem:
            self._move(one, done)
        if not one.end.done():
            one.end.set_result(done)

    def _begin(self, units: Sequence[tuple[TransferFile, SlotPlace]], *, saves: bool) -> asyncio.Future[Transfer]:
        end = asyncio.get_running_loop().create_future()
        links, drafter, with_draft = list(self._toy.links), self._toy.drafter, bool(units[0][0].draft_tensors())
        self.pending.append(_Pending(saves, units, with_draft, end, links, drafter))
        return end

    def _move(self, one: _Pending, done: Transfer) -> None:
        stages = [link.stages[at] for at, link in enumerate(one.links)]
        if one.with_draft and one.drafter is not None and one.drafter is self._toy.drafter:
            stages.append(one.drafter)
        elif one.with_draft and one.saves:
            done.problem = "the drafter was lost"
            return
        elif one.with_draft:
            done.without["drafter"] = "it is away"
        self.n_saved += one.saves
        self.n_restored += not one.saves
        for stage in stages:
            for file, place in one.units[::-1]:  # what a slot is based on comes last
                key = file.fd, stage.stage
                if one.saves:
                    self._held[key] = self._read(stage, place)
                elif key not in self._held:
                    raise Violation(f"stage {stage.stage} reads a file that it has not written")
                else:
                    self._write(stage, place, self._held[key])

    @staticmethod
    def _pages(stage: ToyStage, place: SlotPlace) -> dict[KvGroup, list[Page]]:
        in_host = stage.host_pages
        full = [in_host[i] if i in in_host else stage.pages[KvGroup.FULL][i] for i in place.full]
        window = [] if isinstance(stage, ToyDrafter) else [stage.pages[KvGroup.WINDOW][i] for i in place.window]
        return {KvGroup.FULL: full, KvGroup.WINDOW: window}

    def _read(self, stage: ToyStage, place: SlotPlace) -> _Held:
        pages = {kv_group: [list(page) for page in some] for kv_group, some in self._pages(stage, place).items()}
        after = stage.after.get(place.state, (-1, -1)) if isinstance(stage, ToyDrafter) else (-1, -1)
        return _Held(pages, stage.states[place.state] if place.state >= 0 else 0, after)

    def _write(self, stage: ToyStage, place: SlotPlace, held: _Held) -> None:
        for kv_group, pages in self._pages(stage, place).items():
            for page, bytes_ in zip(pages, held.pages[kv_group], strict=False):
                page[:] = bytes_
        if place.state >= 0:
            stage.states[place.state] = held.state
            if isinstance(stage, ToyDrafter):
                stage.after[place.state] = held.after


KV_GROUPS = [HYBRID, ALL_KV_GROUPS, frozenset({KvGroup.FULL}), frozenset({KvGroup.FULL, KvGroup.WINDOW})]
SLOTS = PrefixSettings(max_slots=8, memory_bytes=1 << 30, min_tokens=1)


def host_tier(
    toy: ToyEngine, limit_bytes: int = 1 << 30, memory: HostMemory | None = None
) -> tuple[SnapshotManager, ToyTransfers]:
    """The manager of a host tier over the daemons of a toy engine, where reading is always faster than computing."""
    transfers, page = ToyTransfers(toy), (StateTensor("k", (64, 1), None),)
    layers = [LayerSpec(0, KvGroup.FULL, {}, page)]
    tier = HostTier(toy.engine.prefixes, layers, layers, Dtype.FLOAT32, memory or HostMemory(), limit_bytes)
    manager = SnapshotManager(toy.engine, lambda: transfers, SavePolicy(1, 0), tier)  # type: ignore[arg-type, return-value]
    manager.start()
    rate = toy.engine.core.scheduler.reuse.prompt_rate
    rate.n, rate.seconds = 1.0, 1e9
    return manager, transfers


async def tasks_run() -> None:
    """Let the manager's tasks go on."""
    for _ in range(12):
        await asyncio.sleep(0)


async def run(toy: ToyEngine, transfers: ToyTransfers, *, quick: bool = False) -> None:
    """Let daemons work and transfers end until nothing is left to do; ``quick``: transfers first."""
    for _ in range(20_000):
        busy = toy.work(0)
        await asyncio.sleep(0)
        if transfers.pending and (quick or not busy):
            transfers.do(0)
            await tasks_run()
        elif not busy:
            await tasks_run()
            if not transfers.pending and not toy.work(0):
                return
    raise AssertionError("the engine is still busy")


async def preempted(toy: ToyEngine, asked: Sequence[GenerationRequest], *, quick: bool = False) -> list[list[int]]:
    """What requests are answered that have no room beside each other; the youngest went to host memory and back."""
    toy.attach()
    manager, transfers = host_tier(toy)
    handles = [toy.engine.submit(one) for one in asked]
    await run(toy, transfers, quick=quick)
    assert toy.engine.statistics().preemptions >= transfers.n_restored >= 1
    await manager.close()
    return [told(await events_of(handle))[0] for handle in handles]


@pytest.mark.parametrize("policy", ["exact", "qk"])
@pytest.mark.parametrize("n_stages", [1, 2])
async def test_pages_that_kv_flash_paged_out_are_the_same_ones_afterwards(
    policy: ResidencyPolicy, n_stages: int
) -> None:
    """So tokens are, too, where attention does not see them: one is computed with half of its pages out."""

    def toy(n_pages: int) -> ToyEngine:
        pools, residency = PoolSizes(n_pages, 0, 16, host_pages=60), Residency(8, policy, tau=16)
        return ToyEngine(limits(max_context=900, residency=residency, pools=pools, prefix=SLOTS), n_stages=n_stages)

    asked = [request(name, [k * k % p for k in range(n)], n=250) for name, n, p in (("a", 230, 79), ("b", 600, 83))]
    roomy = toy(40)
    roomy.attach()
    handles = [roomy.engine.submit(one) for one in asked]
    roomy.run()
    assert roomy.engine.statistics().preemptions == 0
    right = [told(await events_of(handle))[0] for handle in handles]
    assert await preempted(toy(13), asked) == right


async def test_a_request_whose_prompt_is_scored_computes_it_again() -> None:
    """It takes no cached prefix, so what is in host memory would be read for ever."""
    toy = ToyEngine(limits(pools=PoolSizes(6, 0, 16), prefix=SLOTS), n_stages=2)
    toy.attach()
    manager, transfers = host_tier(toy)
    asked = [replace(request(name, range(i, i + 100), n=140), prompt_logprobs=True) for i, name in enumerate("ab")]
    handles = {one.request_id: toy.engine.submit(one) for one in asked}
    await run(toy, transfers)
    assert (toy.engine.statistics().preemptions, transfers.n_restored) == (1, 0)
    assert await check_answers(toy, asked, handles) == ["length", "length"]
    await manager.close()


async def test_state_that_came_back_and_leaves_no_page_for_a_copy_is_computed_again() -> None:
    """The slot holds both window pages, and its last one would have to be copied before it may be evicted."""
    prefix = PrefixSettings(max_slots=1, memory_bytes=9, min_tokens=1, unit_bytes={KvGroup.FULL: 1, KvGroup.WINDOW: 1})
    toy = ToyEngine(
        limits(
            kv_groups=ALL_KV_GROUPS, window_tokens=40, pools=PoolSizes(4, 2, 5), prefix=prefix,
            max_context=400, prefill_chunk=7, max_step_tokens=12, max_sequences=5,
        )
    )  # fmt: skip
    toy.attach()
    manager, transfers = host_tier(toy)
    asked = [request(name, range(n_prompt), n=n) for name, n_prompt, n in (("a", 2, 140), ("b", 30, 130))]
    handles = {one.request_id: toy.engine.submit(one) for one in asked}
    await run(toy, transfers)
    assert toy.engine.statistics().preemptions > 0
    assert await check_answers(toy, asked, handles) == ["length", "length"]
    await manager.close()


@st.composite
def crowds(draw: st.DrawFn) -> Scenario:
    """Requests that all start and whose answers find no room beside each other."""
    kv_groups, max_sequences = draw(st.sampled_from(KV_GROUPS)), draw(st.sampled_from([3, 5]))
    chunk, max_drafts = draw(st.sampled_from([7, 32, 64])), draw(st.sampled_from([0, 0, 3]))
    window = draw(st.sampled_from([1, 40, 130])) if KvGroup.WINDOW in kv_groups else None
    n_window = 0 if window is None else max_window_pages(window, chunk, 400) + draw(st.integers(0, 6))
    n_more, in_host = draw(st.sampled_from([0, 1, 2, 6])), draw(st.booleans())
    bounds = EngineLimits(
        max_sequences=max_sequences,
        max_context=400,
        prefill_chunk=chunk,
        max_step_tokens=chunk + max_sequences * (1 + max_drafts) + draw(st.sampled_from([0, 100])),
        kv_groups=kv_groups,
        pools=PoolSizes(draw(st.sampled_from([4, 5, 6])), n_window, max_sequences + n_more, n_more if in_host else 0),
        window_tokens=window,
        prefix=PrefixSettings(
            max_slots=draw(st.sampled_from([1, 8, 8])),
            memory_bytes=draw(st.sampled_from([1, 9, 1000, 1000])),
            min_tokens=draw(st.sampled_from([1, 40])),
            unit_bytes={KvGroup.FULL: 1, KvGroup.WINDOW: 1, KvGroup.RECURRENT: draw(st.sampled_from([0, 1]))},
        ),
        speculation=SpeculationSettings(max_drafts=max_drafts, drafter=max_drafts > 0, lookup=draw(st.booleans())),
    )
    requests = []
    for i in range(draw(st.sampled_from([3, 4, 5, 6]))):
        n_prompt = draw(st.sampled_from([30, 50, 62]))
        requests.append(
            GenerationRequest(
                request_id=f"r{i}",
                prompt=tuple((k * k + i * draw(st.sampled_from([0, 1]))) % 97 for k in range(n_prompt)),
                max_tokens=draw(st.sampled_from([110, 140])),
                sampling=SamplingParams(seed=i, presence_penalty=draw(st.sampled_from([0.0, 0.5]))),
                stop_ids=frozenset(draw(st.sampled_from([(), (), (5,)]))),
                constraint=ToyConstraint(i) if draw(st.sampled_from([False, False, True])) else None,
            )
        )
    kinds = [*["work"] * 4, *["many"] * 12, *["transfer"] * 8, "fail", "cancel", "crash", "lose", "restart", "move",
             "detach", "attach", "submit"]  # fmt: skip
    actions = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 11)), min_size=30, max_size=90))
    wrong = draw(st.sampled_from([0, 1, 3]))
    return Scenario(bounds, draw(st.integers(1, 3)), draw(st.booleans()), wrong, tuple(requests), tuple(actions))


class Swaps(Play):
    """A scenario whose preempted requests go to host memory; daemons die, are restarted in order or all replaced."""

    def __init__(self, scenario: Scenario, pages: int, limit_bytes: int) -> None:
        super().__init__(scenario, hold_s=60.0, journal_pages=pages)
        self.memory, self.limit_bytes = HostMemory(), limit_bytes
        self.manager, self.transfers = host_tier(self.toy, limit_bytes, self.memory)

    async def play(self) -> None:  # type: ignore[override]
        self.toy.attach()
        self.attach()
        for _ in range(4):
            self.act("submit", 0)
        for kind, index in self.scenario.actions:
            await self.do(kind, index)
            await tasks_run()
            assert self.memory.used(HostOwner.PREFIXES) <= self.limit_bytes
        await self.whole_again()
        while self.waiting:
            self.act("submit", 0)
        await run(self.toy, self.transfers)

    async def do(self, kind: str, index: int) -> None:
        toy = self.toy
        if kind in ("restart", "move", "crash", "lose") and not toy.engine.ready:
            kind = "back"
        match kind:
            case "transfer" | "fail" if self.transfers.pending:
                self.transfers.do(index, "the device failed" if kind == "fail" else "")
            case "many":
                for i in range(3 * index):
                    toy.work(i * index)
                    await asyncio.sleep(0)
            case "crash":
                toy.crash(index % len([daemon for daemon in toy.daemons if daemon.stages]))
            case "back":
                await self.whole_again()
            case "restart" | "move":
                await self.restart(kind, index)
            case "attach" | "detach" if toy.drafter is None or not toy.engine.ready:
                pass
            case "transfer" | "fail":
                pass
            case _:
                self.act(kind, index)

    async def restart(self, kind: str, index: int) -> None:
        toy = self.toy
        frozen = await freeze(toy)
        await tasks_run()
        while self.transfers.pending:  # they are awaited before state is exported
            self.transfers.do(0, "its state is handed to another daemon" if index % 2 else "")
            await tasks_run()
        if kind == "move":
            toy.move(frozen if index % 3 else None)
        elif toy.crash(index % self.scenario.n_stages):
            toy.come_back(frozen if index % 3 else None)
        await self.whole_again()

    async def whole_again(self) -> None:
        toy = self.toy
        if toy.pipeline is not None and not toy.engine.ready:
            if any(link not in toy.daemons for link in toy.links):
                toy.come_back()
            for _ in range(1000):
                await tasks_run()
                if toy.engine.ready or not toy.work(0):
                    break
        if not toy.engine.ready:
            toy.attach()
        if not toy.engine.core.scheduler.drafting.attached:
            self.attach()

    def attach(self) -> None:
        if self.scenario.limits.speculation.drafter:
            super().attach()


@settings(max_examples=8, deadline=None)
@given(crowds(), st.sampled_from([200, 200, 0]), st.sampled_from([1 << 30, 1 << 30, 1500]))
def test_what_was_computed_comes_back(scenario: Scenario, pages: int, limit_bytes: int) -> None:
    async def play() -> None:
        played = Swaps(scenario, pages, limit_bytes)
        with lookups(played.toy, scenario.wrong + 1):
            await played.play()
        await check_answers(played.toy, scenario.requests, played.handles)
        now = played.toy.engine.statistics()
        event(f"preempted: {now.preemptions > 0}, read: {played.transfers.n_restored > 0}")
        assert (now.running, now.queued, now.in_flight) == (0, 0, 0)
        assert played.transfers.pending == []
        assert not any(slot.pins for slot in played.toy.engine.prefixes.slots)
        assert all(use.used == use.evictable for use in now.pages.values())
        await played.manager.close()
        assert played.memory.used(HostOwner.PREFIXES) == 0

    asyncio.run(play())
