"""The simulator of bench/scale.py agrees with closed forms, loses no token, and gains from hosts what it must."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scale import (
    Client,
    Cluster,
    Costs,
    Load,
    Model,
    Run,
    Setup,
    accepted_tokens,
    predict_decode,
    predict_prompt,
    simulate_decode,
    simulate_prompt,
)

FREE = Costs(frame_s=0.0, token_s=0.0, byte_s=0.0, core_s=0.0)
"""A supervisor that takes no time: the same simulation every time."""


def setup(hosts: int, streams: int, **settings: object) -> Setup:
    names = {name: settings.pop(name) for name in [*settings] if name in Cluster.__dataclass_fields__}
    cluster = replace(Cluster(n_hosts=hosts, copies=False), **names)
    return Setup(cluster=cluster, load=Load(streams=streams), costs=FREE, **settings)


@pytest.mark.parametrize("hosts", [1, 2, 3, 8])
@pytest.mark.parametrize("latency_s", [0.0, 1e-3, 10e-3])
def test_one_stream_takes_all_stages_and_all_hops(hosts: int, latency_s: float) -> None:
    one = setup(hosts, 1, latency_s=latency_s)
    model, cluster = one.model, one.cluster
    sent = model.row_bytes / cluster.bytes_per_s
    hops = (hosts - 1) * (latency_s + cluster.hop_s + sent) + (hosts > 1) * (latency_s + cluster.hop_s)
    expected = model.step_s(1) + hosts * model.stage_s + hops
    found = simulate_decode(one)
    assert found.token_s == pytest.approx(expected, rel=0.005)  # tokens have a few bytes, too
    assert predict_decode(model, cluster, 1).round_s == pytest.approx(expected)


@pytest.mark.parametrize(("hosts", "streams"), [(1, 32), (2, 8), (4, 4), (4, 64), (8, 64)])
@pytest.mark.parametrize("latency_s", [0.0, 0.5e-3, 5e-3])
def test_micro_batches_share_the_stages(hosts: int, streams: int, latency_s: float) -> None:
    many = setup(hosts, streams, latency_s=latency_s)
    expected = predict_decode(many.model, many.cluster, streams)
    assert simulate_decode(many).tokens_per_s == pytest.approx(expected.tokens_per_s, rel=0.02)


@pytest.mark.parametrize(("chance", "width"), [(0.0, 3), (1.0, 3), (0.8, 5)])
@pytest.mark.parametrize("hosts", [1, 4])
def test_drafts_are_accepted_by_chance_and_take_their_time(hosts: int, chance: float, width: int) -> None:
    one = setup(hosts, 1, drafts=width, chance=chance)
    found = simulate_decode(one, rounds=150)
    expected = predict_decode(one.model, one.cluster, 1, drafts=width, chance=chance)
    assert found.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=0.1 if 0 < chance < 1 else 0.02)
    assert accepted_tokens(width, 1.0) == width + 1


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_chunks_of_a_prompt_follow_each_other(hosts: int) -> None:
    one = setup(hosts, 1, chunk=512)
    expected = predict_prompt(one.model, one.cluster, 8192, 512)
    assert simulate_prompt(one, 8192) == pytest.approx(expected.round_s, rel=0.02)


def test_rows_wait_for_a_slow_link() -> None:
    one = setup(2, 1, bytes_per_s=20e6, chunk=512)
    chunk_s = 512 * Model.row_bytes / 20e6
    assert simulate_prompt(one, 4096) == pytest.approx(8 * chunk_s, rel=0.2)
    assert predict_prompt(one.model, one.cluster, 4096, 512).limit == "link of a stage"


def test_copies_for_the_journal_take_the_supervisors_link_and_cpu() -> None:
    without = setup(8, 1, chunk=1024)
    with_copies = replace(without, cluster=replace(without.cluster, copies=True))
    n_bytes = 6 * 32_768 * Model.row_bytes  # of all boundaries but that of its own host
    assert simulate_prompt(with_copies, 32_768) >= n_bytes / with_copies.cluster.bytes_per_s
    assert simulate_prompt(without, 32_768) < 0.6 * simulate_prompt(with_copies, 32_768)
    slow = replace(with_copies, costs=replace(FREE, byte_s=5e-9))
    assert simulate_prompt(slow, 32_768) == pytest.approx(7 * 32_768 * Model.row_bytes * 5e-9, rel=0.1)


@settings(max_examples=25, deadline=None)
@given(
    hosts=st.integers(1, 7),
    streams=st.integers(1, 40),
    latency_s=st.floats(0.0, 3e-3),
    hop_s=st.floats(0.0, 2e-4),
)
def test_another_host_costs_a_replica_no_more_than_its_hop(
    hosts: int, streams: int, latency_s: float, hop_s: float
) -> None:
    model = Model(stage_s=0.0)
    few = replace(setup(hosts, streams, latency_s=latency_s, hop_s=hop_s), model=model)
    more = replace(few, cluster=replace(few.cluster, n_hosts=hosts + 1))
    rows = math.ceil(streams / min(hosts, streams))
    # With the second host come a hop and the way back of the tokens.
    hop = (latency_s + hop_s) * (2 if hosts == 1 else 1) + rows * model.row_bytes / few.cluster.bytes_per_s
    before, after = (streams / simulate_decode(one).tokens_per_s for one in (few, more))
    assert after <= (before + hop) * 1.05


@settings(max_examples=20, deadline=None)
@given(
    hosts=st.integers(1, 5),
    replicas=st.integers(1, 3),
    streams=st.integers(1, 12),
    prompt=st.integers(1, 300),
    answer=st.integers(1, 12),
    turns=st.integers(1, 3),
    drafts=st.integers(0, 3),
)
def test_no_token_is_lost_or_made_twice(
    hosts: int, replicas: int, streams: int, prompt: int, answer: int, turns: int, drafts: int
) -> None:
    load = Load(streams=streams, prompt=prompt, answer=answer, turns=turns, system=130, n_systems=2)
    run = Run(
        Setup(
            cluster=Cluster(n_hosts=hosts), load=load, costs=FREE, n_replicas=replicas, drafts=drafts, chance=0.5,
            chunk=128, slots=8,
        )
    )  # fmt: skip
    n_wanted, begin = 3 * streams, Client.begin
    for client in run.clients:
        run.simulation.at(0.0, client.begin)
    for client in run.clients:
        client.begin = lambda client=client: begin(client) if run.n_finished < n_wanted else None  # type: ignore[method-assign]
    run.simulation.run(lambda: False)
    assert run.n_finished >= n_wanted
    assert run.n_generated == run.n_finished * answer
    assert sum(replica.n_tokens for replica in run.replicas) == run.n_generated
    assert sum(client.n_tokens for client in run.clients) == run.n_generated
    assert all(replica.core.scheduler.idle and not replica.n_running for replica in run.replicas)


def test_one_supervisor_saturates_and_two_serve_twice_as_much() -> None:
    costs = replace(FREE, token_s=1e-3)
    one = Setup(cluster=Cluster(n_hosts=1), load=Load(streams=64), costs=costs, n_replicas=2)
    two = replace(one, n_supervisors=2)
    single, double = simulate_decode(one, rounds=10), simulate_decode(two, rounds=10)
    assert single.tokens_per_s == pytest.approx(1000, rel=0.05)
    assert max(single.supervisors) > 0.95
    assert double.tokens_per_s == pytest.approx(2000, rel=0.05)


def test_conversations_stay_where_their_prefix_is() -> None:
    load = Load(streams=16, prompt=1000, answer=8, turns=6, think_s=1.0)
    by_prefix = Setup(cluster=Cluster(n_hosts=1), load=load, costs=FREE, n_replicas=4, n_supervisors=4, slots=64)
    cached = [Run(each).measure(n_requests=60).cached for each in (by_prefix, replace(by_prefix, by_load=True))]
    assert cached[0] > 0.6
    assert cached[1] < 0.7 * cached[0]
