"""Who is served: keys, loopback, Host header, origins."""

from __future__ import annotations

import hmac
import io
import resource
import zlib
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from lucevisor.api.access import check_access, cors_headers
from lucevisor.api.contexts import ApiSettings
from lucevisor.api.errors import ApiError
from lucevisor.api.keys import ApiKeys, Caller
from lucevisor.config import ApiKey
from lucevisor.engine.request import GenerationRequest
from lucevisor.engine.shell import Engine
from tests.api.scripted_model import MODEL, Rig

CHAT = "/v1/chat/completions"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def access(path="/v1/models", *, remote="127.0.0.1", keys=(), admin=(), headers=(), **settings):
    """Status that a request of this kind is refused with, or 200."""
    request = make_mocked_request("GET", path, headers=dict(headers)).clone(remote=remote)
    try:
        check_access(request, ApiSettings(**settings), ApiKeys(map(ApiKey, keys)), ApiKeys(map(ApiKey, admin)))
    except ApiError as error:
        return error.status
    return 200


class TestWithoutKeys:
    @pytest.mark.parametrize(
        ("remote", "status"),
        [
            ("127.0.0.1", 200),
            ("127.8.9.1", 200),
            ("::1", 200),
            ("::ffff:127.0.0.1", 200),
            ("192.168.1.5", 403),
            ("::ffff:192.168.1.5", 403),
            ("2001:db8::1", 403),
            ("fe80::1%eth0", 403),
            ("", 403),
            ("localhost", 403),
        ],
    )
    def test_loopback_only(self, remote, status):
        assert access(remote=remote) == status
        assert access("/health", remote=remote) == status
        assert access(remote=remote, allow_open=True) == 200

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost", 200),
            ("localhost:8080", 200),
            ("LOCALHOST:8080", 200),
            ("127.0.0.1:1", 200),
            ("[::1]:8080", 200),
            ("app.localhost", 200),
            ("box.lan:8080", 200),
            ("evil.example", 403),
            ("evil.example:8080", 403),
            ("127.0.0.1.evil.example", 403),
            ("[2001:db8::1]:80", 403),
        ],
    )
    def test_a_name_that_is_not_this_machines(self, host, status):
        assert access(headers={"Host": host}, host="box.lan") == status
        assert access(headers={"Host": host}, host="box.lan", allow_open=True) == 200
        assert access(headers={"Host": host, "x-api-key": "k"}, keys=["k"]) == 200


class TestWithKeys:
    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 401),
            ({"Authorization": "Bearer one"}, 200),
            ({"Authorization": "bearer  two "}, 200),
            ({"x-api-key": "one"}, 200),
            ({"Authorization": "Bearer three"}, 401),
            ({"Authorization": "Basic one"}, 401),
            ({"Authorization": "one"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": "Bearer one two"}, 401),
        ],
    )
    def test_one_of_them_is_needed(self, headers, status):
        assert access(keys=["one", "two"], headers=headers) == status
        assert access(keys=["one", "two"], headers=headers, allow_open=True) == status
        assert access("/health", keys=["one"], headers=headers) == 200
        assert access("/metrics", keys=["one", "two"], headers=headers) == status

    def test_admin_keys_are_for_admin_paths_and_open_the_rest(self):
        sent = {"x-api-key": "root"}
        assert access("/admin/restart", headers=sent) == 403
        assert access("/admin/restart", keys=["one"], headers={"x-api-key": "one"}) == 403
        assert access("/admin/restart", keys=["one"], admin=["root"], headers={"x-api-key": "one"}) == 401
        assert access("/admin/restart", keys=["one"], admin=["root"], headers=sent) == 200
        assert access("/admin/restart", admin=["root"], headers=sent, remote="192.168.1.5") == 403
        assert access("/status", keys=["one"], admin=["root"], headers=sent) == 200
        assert access("/status", admin=["root"]) == 200

    def test_from_anywhere(self):
        assert access(remote="203.0.113.9", keys=["one"], headers={"x-api-key": "one"}) == 200

    async def test_over_a_socket(self, start):
        rig = Rig(keys=ApiKeys([ApiKey("s3cret")]))
        client = await start(rig)
        async with client.session.post(client.url + CHAT, json=BODY) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            answer = await response.json()
        assert (answer["error"]["type"], answer["error"]["code"]) == ("authentication_error", "invalid_api_key")
        good = {"Authorization": "Bearer s3cret"}
        assert (await client.ask(CHAT, BODY, headers=good))[0] == 200
        rig.context.server.keys.replace([ApiKey("other")])
        assert (await client.ask(CHAT, BODY, headers=good))[0] == 401
        assert (await client.ask("/ready"))[0] == 200
        assert (await client.ask("/v1/nope"))[0] == 401  # paths are not told to strangers either


class TestOrigins:
    async def asks(self, client, method="POST", origin="https://app.example", **headers):
        body = {"json": BODY} if method == "POST" else {}
        async with client.session.request(
            method, client.url + CHAT, headers={"Origin": origin, **headers}, **body
        ) as response:
            await response.read()
            return response

    async def test_off_unless_configured(self, client):
        response = await self.asks(client)
        assert response.status == 200
        assert not [h for h in response.headers if h.lower().startswith("access-control")]
        assert (await self.asks(client, "OPTIONS", **PREFLIGHT)).status == 405

    async def test_exact_origins(self, start):
        client = await start(
            Rig(settings=ApiSettings(cors_origins=("https://app.example",)), keys=ApiKeys([ApiKey("k")]))
        )
        preflight = await self.asks(client, "OPTIONS", **PREFLIGHT)  # carries no key, by specification
        assert preflight.status == 204
        assert preflight.headers["Access-Control-Allow-Origin"] == "https://app.example"
        for sent in ("authorization,content-type,x-stainless-lang,x-stainless-retry-count", "x-of-a-later-version"):
            preflight = await self.asks(client, "OPTIONS", **{**PREFLIGHT, "Access-Control-Request-Headers": sent})
            assert preflight.headers["Access-Control-Allow-Headers"] == sent
        real = await self.asks(client, Authorization="Bearer k")
        assert real.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert real.headers["Vary"] == "Origin"
        refused = await self.asks(client)  # the page may read why
        assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "https://app.example")
        for other in ("https://app.example.evil", "http://app.example", "null"):
            response = await self.asks(client, "OPTIONS", other, **PREFLIGHT)
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.status != 204

    async def test_streams_carry_the_headers(self, start):
        client = await start(Rig(settings=ApiSettings(cors_origins=("https://app.example",))))
        async with client.session.post(
            client.url + CHAT, json={**BODY, "stream": True}, headers={"Origin": "https://app.example"}
        ) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            await response.read()

    def test_a_star_lets_every_page_in(self):
        settings = ApiSettings(cors_origins=("*",))
        assert cors_headers("https://x.example", settings)["Access-Control-Allow-Origin"] == "*"
        assert cors_headers(None, settings) == {}


class TestCompressedBodies:
    @pytest.mark.parametrize("coding", ["GZip", "zstd", "identity, gzip", ""])
    async def test_they_are_refused(self, client, coding):
        headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
        for path in (CHAT, "/tokenize"):
            async with client.session.post(client.url + path, data=b"\x1f\x8b{}", headers=headers) as response:
                answer = await response.json()
                assert response.status == 415
                assert response.headers["Accept-Encoding"] == "identity"
            assert answer["error"]["code"] == "unsupported_content_encoding"
            assert "uncompressed" in answer["error"]["message"]
        assert (await client.chat())[0] == 200

    async def test_identity_is_no_coding(self, client):
        status, _ = await client.ask(CHAT, BODY, headers={"Content-Encoding": "identity"})
        assert status == 200

    async def test_a_bomb_is_not_inflated(self, client):
        packer = zlib.compressobj(wbits=31)
        bomb = io.BytesIO(b"".join(packer.compress(bytes(1 << 20)) for _ in range(100)) + packer.flush())
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        try:
            async with client.session.post(client.url + CHAT, data=bomb, headers=headers) as response:
                assert response.status == 415
        except aiohttp.ClientConnectionError:  # the server closed before all was sent
            pass
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 << 10
        assert (await client.chat())[0] == 200


# ---- Keys: who is let in, and by which name


ALPHA, BETA = ApiKey("alpha"), ApiKey("beta")


def test_each_key_is_accepted_and_nothing_else():
    keys = ApiKeys([ALPHA, BETA])
    assert keys.required
    assert all(keys.caller(k) for k in ("alpha", "beta"))
    assert not any(keys.caller(k) for k in ("", "alph", "alphabeta", "ALPHA", "é", "alpha\x00", "\udcff"))


def test_every_key_is_compared_whichever_matches(monkeypatch):
    compared = []
    real = hmac.compare_digest

    def spy(a, b):
        compared.append(len(a) == len(b))
        return real(a, b)

    keys = ApiKeys(map(ApiKey, ["first", "second", "third, which is longer"]))
    monkeypatch.setattr("lucevisor.api.keys.hmac.compare_digest", spy)
    for token in ("first", "third, which is longer", "none"):
        compared.clear()
        keys.caller(token)
        assert compared == [True, True, True]


def test_keys_are_replaced():
    keys = ApiKeys([ALPHA])
    keys.replace([BETA])
    assert keys.caller("beta")
    assert not keys.caller("alpha")
    keys.replace([])
    assert not keys.required


def test_no_key_is_in_the_object():
    key = ApiKey("secret", "ann")
    assert "secret" not in repr(vars(ApiKeys([key]))) + repr(key)


def test_callers_are_told_apart_by_ids_that_do_not_tell_the_key():
    keys = ApiKeys([ALPHA, BETA, ApiKey("\udcff")])
    alpha, beta, odd = (keys.caller(k) for k in ("alpha", "beta", "\udcff"))
    assert alpha == keys.caller("alpha")
    assert len({alpha.id, beta.id, odd.id}) == 3
    assert "alpha" not in alpha.id
    assert alpha.name == ""


def test_keys_of_one_name_are_one_caller():
    keys = ApiKeys([ApiKey("old", "ann"), ApiKey("new", "ann"), ApiKey("ann"), ApiKey("other", "bob")])
    ann = keys.caller("old")
    assert ann == keys.caller("new")
    assert ann.name == "ann"
    assert len({keys.caller(k).id for k in ("old", "ann", "other")}) == 3


# ---- keys and shares


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


@pytest.mark.parametrize(("retry_in_s", "told"), [(None, "5"), (0.0, "1"), (17.2, "18"), (1e6, "3600")])
async def test_a_503_says_when_lost_groups_are_started_again(start, retry_in_s, told):
    client = await start(Rig(attach=False, retry_in_s=lambda: retry_in_s))
    async with client.session.post(f"{client.url}/v1/completions", json={"prompt": "Hi"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, told)
