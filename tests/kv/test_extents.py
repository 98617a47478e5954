"""Pages and recurrent states in one memory: any ratio fits, and no id is given out twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lucevisor.kv.page_pool import PagePools
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes


class OneMemory(RuleBasedStateMachine):
    """Ids are taken and released at random; the model knows what each one covers."""

    @initialize(n=st.integers(1, 6), per_state=st.integers(1, 5), alone=st.integers(0, 7))
    def make(self, n, per_state, alone):
        self.n, self.per_state, self.total = n, per_state, n * per_state + alone
        sizes = PoolSizes(self.total, 0, n, state_pages=per_state)
        self.pools = PagePools([KvGroup.FULL, KvGroup.RECURRENT], sizes)
        self.pages: list[int] = []
        self.states: list[int] = []

    def covered(self) -> list[int]:
        """Pages whose memory is in use."""
        n = self.per_state
        return [*self.pages, *(page for state in self.states for page in range(state * n, (state + 1) * n))]

    @rule(n_pages=st.integers(0, 9), n_states=st.integers(0, 3))
    def take(self, n_pages, n_states):
        needs = {KvGroup.FULL: n_pages, KvGroup.RECURRENT: n_states}
        used = set(self.covered())
        free = [i for i in range(self.n) if used.isdisjoint(range(i * self.per_state, (i + 1) * self.per_state))]
        n_left = self.total - len(used) - n_states * self.per_state
        fits = n_states <= len(free) and n_pages <= n_left
        assert self.pools.fits(needs) == fits
        has_extents = n_states <= self.n - len(self.states)
        assert self.pools.fits_elsewhere(needs) == (not fits and n_pages <= n_left and has_extents)
        taken = self.pools.allocate(needs)
        assert (taken is not None) == fits
        if taken is not None:
            assert [len(taken[kv_group]) for kv_group in needs] == [n_pages, n_states]
            self.pages += taken[KvGroup.FULL]
            self.states += taken[KvGroup.RECURRENT]

    @rule(data=st.data())
    def release(self, data):
        for kv_group, held in ((KvGroup.FULL, self.pages), (KvGroup.RECURRENT, self.states)):
            ids = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
            self.pools.release(kv_group, ids)
            for one in ids:
                held.remove(one)

    @invariant()
    def nothing_is_given_out_twice_and_nothing_leaks(self):
        covered = self.covered()
        assert len(covered) == len(set(covered))
        assert self.pools[KvGroup.FULL].n_free == self.total - len(covered)
        for kv_group, held in ((KvGroup.FULL, self.pages), (KvGroup.RECURRENT, self.states)):
            assert self.pools[kv_group].problems([]) == []
            use = self.pools.usage()[kv_group]
            assert (use.used, use.free) == (len(held), self.pools[kv_group].n_free)


TestOneMemory = OneMemory.TestCase
TestOneMemory.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_states_and_pages_stay_apart_as_long_as_they_can():
    pools = PagePools([KvGroup.FULL, KvGroup.RECURRENT], PoolSizes(44, 0, 10, state_pages=4))
    full, states = pools[KvGroup.FULL], pools[KvGroup.RECURRENT]
    assert full.allocate(5) == [40, 41, 42, 43, 36]  # those that no state can use, then the last extent
    assert states.allocate(2) == [0, 1]
    assert full.allocate(4) == [37, 38, 39, 32]
    assert states.n_free == 6
    full.release([36, 37, 38])
    assert states.n_free == 6
    full.release([39])
    assert states.n_free == 7
