"""A transfer of several daemons and units ends with the last answer, whatever came first."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.kv_transfer.transfers import CREDITS, KvTransfer, Transfer, TransferFile
from lucevisor.model.values import LayerRange
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.messages import (
    KIND_OF,
    Restore,
    Restored,
    Save,
    Saved,
    SlotPlace,
    TransferFailed,
    TransferTensor,
)

PLACE = SlotPlace(1)


@dataclass
class Link:
    """A daemon's link; ``orders``: what it was sent and has not answered."""

    alive: bool = True
    orders: list[Save | Restore] = field(default_factory=list)

    def send(self, message: Save | Restore, *, request_id: int, fds: Sequence[int]) -> None:
        assert message.transfer == request_id
        if not self.alive:
            raise LinkClosed("broken pipe", "link", "see its log")
        assert [os.fstat(fd).st_size for fd in fds] == [0]
        self.orders.append(message)


class Daemons:
    """``KvTransfer`` over links of groups that have a layer each, and of a drafter's."""

    def __init__(self, *groups: str, draft: str = "") -> None:
        self.transfers = KvTransfer({group: [LayerRange(i, i + 1)] for i, group in enumerate(groups)}, draft)
        self.n_layers, self.draft, self.links = len(groups), draft, dict[str, Link]()
        for group in (*groups, *([draft] if draft else [])):
            self.ready(group)

    def ready(self, group: str) -> None:
        self.links[group] = Link()
        self.transfers.on_ready(group, self.links[group])  # type: ignore[arg-type]

    def lose(self, group: str) -> None:
        self.links[group].alive = False
        self.transfers.on_lost(group, "killed")

    def begin(
        self, *, loads: bool = False, n: int = 1, groups: Sequence[str] | None = None
    ) -> asyncio.Future[Transfer]:
        """Move units of ten bytes of each layer, and five of the drafter; their files are closed at once."""
        fds = [os.memfd_create("unit") for _ in range(n)]
        tensors = [TransferTensor(f"layers.{i}.k", i, "k", "I8", (10,), 0, 10) for i in range(self.n_layers)]
        if self.draft:
            tensors.append(TransferTensor("draft.0.k", 0, "k", "I8", (5,), 0, 5, draft=True))
        move = self.transfers.load if loads else self.transfers.save
        end = move([(TransferFile("made", fd, tensors), PLACE) for fd in fds], groups)
        for fd in fds:
            os.close(fd)
        return end

    def answer(self, group: str, problem: str = "", *, short: int = 0, at: int = 0) -> None:
        """Answer one message of a daemon, twice."""
        order = self.links[group].orders.pop(at)
        n_bytes = sum(tensor.n_bytes for tensor in order.tensors) - short
        answer: Saved | Restored | TransferFailed = Saved(order.transfer, n_bytes, 0.1)
        if isinstance(order, Restore):
            answer = Restored(order.transfer, n_bytes, 0.1, "BF16 to float32")
        if problem:
            answer = TransferFailed(order.transfer, "tensor layers.0.k", problem, "")
        for _ in range(2):
            assert self.transfers.frame(group, Frame(KIND_OF[type(answer)], 1, 0, answer, memoryview(b"")))


async def test_a_drafter_that_fails_does_not_fail_a_load() -> None:
    daemons = Daemons("left", draft="draft")
    end = daemons.begin(loads=True)
    daemons.answer("left")
    daemons.lose("draft")
    transfer = await end
    assert (transfer.problem, transfer.without) == ("", {"draft": "group draft was lost: killed"})
    assert transfer.converted == "BF16 to float32"


async def test_a_lost_daemon_ends_its_transfers() -> None:
    daemons = Daemons("left", "right")
    both, one = daemons.begin(), daemons.begin(groups=["left"])
    daemons.lose("left")
    assert (await one).problem == "group left was lost: killed"
    assert not both.done()
    daemons.answer("right")
    assert (await both).problem == "group left was lost: killed"
    assert (await daemons.begin(groups=["left"])).problem == "group left could not be asked: it is away"


async def test_prefix_slots_are_refused_while_state_is_exported() -> None:
    daemons = Daemons("left")
    ends = [daemons.begin() for _ in range(CREDITS + 2)]
    quiesced = asyncio.create_task(daemons.transfers.quiesce("its state is moved"))
    await asyncio.sleep(0)
    assert [end.result().problem for end in ends if end.done()] == ["it was cancelled: its state is moved"] * 2
    for _ in range(CREDITS):
        assert not quiesced.done()
        daemons.answer("left")
    await quiesced
    assert ends[0].result().problem == ""
    assert "its state is moved" in (await daemons.begin()).problem
    own = daemons.begin(groups=["left"])  # what exports the state names its groups
    daemons.answer("left")
    assert (await own).problem == ""
    daemons.transfers.resume()
    assert not daemons.begin().done()


ACTIONS = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 3), st.booleans(), st.integers(0, 2 * CREDITS)),
    st.tuples(st.sampled_from(["answer", "answer", "fail"]), st.integers(0, 2), st.just(None), st.integers(0, CREDITS)),
    st.tuples(st.sampled_from(["lose", "dies", "ready", "cancel"]), st.integers(0, 2), st.none(), st.none()),
)


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.sampled_from(["", "left", "draft"]))
def test_every_transfer_ends_once_and_no_daemon_has_more_than_its_credits(actions: list, draft: str) -> None:
    async def play() -> None:
        daemons = Daemons("left", "right", draft=draft)
        names, ends = list(daemons.links), []
        n_fds = len(os.listdir("/proc/self/fd"))
        for kind, index, loads, n in actions:
            group = names[index % len(names)]
            link = daemons.links[group]
            match kind:
                case "begin":
                    ends.append((daemons.begin(loads=loads, n=n, groups=names[:index] or None), n))
                case "answer" | "fail" if link.orders:
                    daemons.answer(group, "disk full" if kind == "fail" else "", at=n % len(link.orders))
                case "cancel":
                    daemons.transfers.cancel_waiting(group, "reset")
                case "lose":
                    daemons.lose(group)
                    link.orders.clear()
                case "dies":  # what follows cannot be sent
                    link.alive = False
                case "ready" if not link.alive:
                    daemons.lose(group)
                    daemons.ready(group)
            assert all(len(link.orders) <= CREDITS for link in daemons.links.values())
        while asked := [name for name, link in daemons.links.items() if link.orders]:
            daemons.answer(asked[0])
        problems = Counter()
        for end, n in ends:
            assert end.done()
            transfer = end.result()
            problems[transfer.problem] += 1
            if not transfer.problem and not transfer.without and not draft:
                assert transfer.n_bytes in (10 * n, 20 * n)
        assert len(os.listdir("/proc/self/fd")) == n_fds

    asyncio.run(play())
