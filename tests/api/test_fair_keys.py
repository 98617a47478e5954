"""Which key a request came with reaches the scheduler, and a 503 tells when to come back."""

from __future__ import annotations

from typing import Any

import pytest

from lucevisor.api.keys import ApiKeys, Caller
from lucevisor.config import ApiKey
from lucevisor.engine.core import Engine
from lucevisor.engine.request import GenerationRequest
from tests.api.scripted_model import MODEL, Rig


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[GenerationRequest]:
    """Requests as the engine gets them."""
    seen: list[GenerationRequest] = []
    real = Engine.submit

    def submit(engine: Engine, request: GenerationRequest) -> Any:
        seen.append(request)
        return real(engine, request)

    monkeypatch.setattr(Engine, "submit", submit)
    return seen


async def test_requests_are_told_apart_by_the_key_they_came_with(start, submitted):
    keys = ApiKeys([ApiKey("alpha"), ApiKey("beta"), ApiKey("gamma", "ann"), ApiKey("delta", "ann")])
    client = await start(Rig(keys=keys))
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "n": 2}
    for headers in ({"Authorization": "Bearer alpha"}, {"x-api-key": "beta"}, {"x-api-key": "gamma"}):
        status, _ = await client.ask("/v1/completions", body, headers=headers)
        assert status == 200
    ids = [request.client_id for request in submitted]
    assert ids == [id_ for key in ("alpha", "beta", "delta") for id_ in [keys.caller(key).id] * 2]
    assert not any("alpha" in request.client_id for request in submitted)


async def test_without_keys_in_force_what_is_shown_makes_no_difference(start, submitted):
    client = await start(Rig())
    status, _ = await client.ask(
        "/v1/completions", {"prompt": "Hi", "max_tokens": 1}, headers={"Authorization": "Bearer x"}
    )
    assert status == 200
    status, _ = await client.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
    assert status == 200
    assert {request.client_id for request in submitted} == {Caller.of_address("127.0.0.1").share}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "127.0.0.1", False),  # a Unix socket
    ],
)
def test_addresses_are_told_apart_as_far_as_one_client_cannot_choose_them(one, other, same):
    shares = [Caller.of_address(address).share for address in (one, other)]
    assert (shares[0] == shares[1]) == same
    assert not any(address and address in share for address, share in zip((one, other), shares, strict=True))
    assert Caller.of_address(one).id == ""


@pytest.mark.parametrize(("ready_in_s", "told"), [(None, "5"), (0.0, "1"), (17.2, "18"), (1e6, "3600")])
async def test_a_503_says_when_the_chain_is_likely_to_be_back(start, ready_in_s, told):
    client = await start(Rig(attach=False, ready_in_s=lambda: ready_in_s))
    async with client.session.post(f"{client.url}/v1/completions", json={"prompt": "Hi"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, told)


async def test_the_wait_in_the_queue_is_measured(start):
    client = await start(Rig())
    await client.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
    async with client.session.get(f"{client.url}/metrics") as response:
        assert "lucevisor_queue_seconds_count 1.0" in await response.text()
