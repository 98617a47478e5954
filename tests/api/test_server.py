"""Binding, draining, and what happens to requests when clients, shards or the server go away."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest
from structlog.testing import capture_logs

from lucevisor.api.contexts import ApiSettings, NotReadyPart
from lucevisor.api.server import adopt, create_app, drain, listen, serve, url_of
from lucevisor.errors import ConfigError
from tests.api.raw_http import BODY, CHAT, head, raw_post
from tests.api.scripted_model import LOST, Rig, say
from tests.waiting import until


def endless(rig, step_s=0.002):
    rig.stage.script = say("word ", end=False)
    rig.stage.step_s = step_s


class TestBinding:
    async def test_any_address_is_told_as_one_that_can_be_asked(self):
        runner, url = await serve(create_app(Rig().context), listen("0.0.0.0", 0))
        async with aiohttp.ClientSession() as session, session.get(url + "/health") as response:
            assert response.status == 200
        await runner.cleanup()

    async def test_a_taken_port(self):
        runner, url = await serve(create_app(Rig().context), listen("127.0.0.1", 0))
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"server\.port = {port}: is taken on 127\.0\.0\.1"):
            await serve(create_app(Rig().context), listen("127.0.0.1", port))
        await runner.cleanup()

    @pytest.mark.parametrize(
        ("host", "port", "key"), [("203.0.113.7", 0, "server.host"), ("127.0.0.1", 70000, "server.port")]
    )
    async def test_addresses_that_cannot_be_bound(self, host, port, key):
        with pytest.raises(ConfigError) as caught:
            await serve(create_app(Rig().context), listen(host, port))
        assert caught.value.key == key


class TestNotReady:
    async def test_before_there_is_an_engine(self, start):
        rig = Rig(attach=False, engine=None)
        rig.waiting_for = [NotReadyPart("group left", "loading")]
        client = await start(rig)
        async with client.session.post(client.url + CHAT, json=BODY) as response:
            answer = await response.json()
            assert response.status == 503
            assert response.headers["Retry-After"] == "5"
        assert "group left is loading" in answer["error"]["message"]
        assert answer["error"]["type"] == "server_error"

    async def test_while_a_shard_is_away_and_after(self, client):
        client.rig.lose()
        status, answer = await client.chat()
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert "group left was killed" in answer["error"]["message"]
        client.rig.attach()
        assert (await client.chat())[0] == 200

    async def test_a_full_queue(self, start):
        client = await start(Rig(max_queue=2))
        client.rig.stage.held = True
        asked = [asyncio.create_task(client.chat(max_tokens=1)) for _ in range(4)]  # two steps are in flight
        await until(lambda: client.rig.engine.statistics().queued == 2)
        async with client.session.post(client.url + CHAT, json=BODY) as response:
            answer = await response.json()
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        assert (answer["error"]["type"], answer["error"]["code"]) == ("rate_limit_error", "queue_full")
        client.rig.stage.release()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}

    async def test_choices_that_do_not_all_fit_leave_nothing_behind(self, start):
        client = await start(Rig(max_queue=2))
        client.rig.stage.held = True
        status, answer = await client.chat(n=20)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert client.rig.engine.statistics().queued == 0
        client.rig.stage.release()
        await until(lambda: client.rig.n_busy == 0)


class TestLostShard:
    async def test_before_the_first_token_the_status_tells(self, client):
        client.rig.stage.held = True
        asked = asyncio.create_task(client.chat(stream=True))
        await until(lambda: client.rig.engine.statistics().running == 1)
        client.rig.lose()
        status, answer = await asked
        assert (status, answer["error"]["code"]) == (503, "shard_lost")
        assert "group left was killed" in answer["error"]["message"]

    @pytest.mark.parametrize("n", [1, 3])
    async def test_in_a_stream_the_last_event_is_the_error(self, client, n):
        endless(client.rig)
        body = {**BODY, "stream": True, "n": n}
        with capture_logs() as logs:
            async with client.session.post(client.url + CHAT, json=body) as response:
                assert response.status == 200
                text = (await response.content.readuntil(b"word")).decode()
                client.rig.lose()
                text += (await response.read()).decode()
        events = [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]
        error = json.loads(events[-1])
        assert set(error) == {"error"}
        assert (error["error"]["code"], error["error"]["type"]) == ("shard_lost", "server_error")
        assert "[DONE]" not in text
        assert not any(c.get("finish_reason") for e in events[:-1] for c in json.loads(e)["choices"])
        (line,) = [entry for entry in logs if entry["event"] == "request"]
        assert line["status"] == 503  # the head said 200, log and metrics say how it ended
        client.rig.attach()
        client.rig.stage.script = say("ok")
        assert (await client.chat())[0] == 200


class TestHeld:
    async def test_a_stream_gets_comments_and_goes_on(self, start):
        client = await start(Rig(settings=ApiSettings(keepalive_s=0.05)))
        client.rig.engine.core.recovery.hold_s = 60.0
        endless(client.rig)
        async with client.session.post(client.url + CHAT, json={**BODY, "stream": True}) as response:
            await response.content.readuntil(b"word")
            client.rig.lose()
            metrics = await (await client.session.get(client.url + "/metrics")).text()
            assert 'lucevisor_requests_held{model="scripted/demo"} 1.0' in metrics
            text = await response.content.readuntil(b": waiting\n\n")
            assert b"error" not in text
            client.rig.attach()
            await response.content.readuntil(b"word")
        metrics = await (await client.session.get(client.url + "/metrics")).text()
        assert 'lucevisor_pause_seconds_count{model="scripted/demo",reason="loss"} 1.0' in metrics
        assert 'lucevisor_recovered_sequences_total{model="scripted/demo"} 1.0' in metrics

    async def test_one_that_has_not_begun_may_still_get_a_503(self, client):
        client.rig.engine.core.recovery.hold_s = 60.0
        client.rig.lose()
        asked = asyncio.create_task(client.chat(stream=True))
        await until(lambda: client.rig.engine.statistics().recovery.held == 1)
        await asyncio.sleep(0.1)
        client.rig.engine.detach(LOST, permanent=True)
        status, answer = await asked
        assert (status, answer["error"]["code"]) == (503, "shard_lost")


class TestClientGoesAway:
    @pytest.mark.parametrize("more", [{"stream": True}, {}, {"n": 3, "stream": True}])
    async def test_everything_is_freed_at_once(self, client, more):
        endless(client.rig, step_s=0.01)
        with capture_logs() as logs:
            sock = raw_post(client, {**BODY, **more})
            await until(lambda: client.rig.engine.statistics().generated_tokens > 3)
            n_before = client.rig.engine.statistics().generated_tokens
            sock.close()
            await until(lambda: client.rig.engine.statistics().running == 0)
            await until(lambda: client.rig.n_busy == 0)
            await until(lambda: [e for e in logs if e["event"] == "request"])
        (line,) = [e for e in logs if e["event"] == "request"]
        assert line["status"] == 499
        assert 3 <= line["generated_tokens"] < n_before + 50 * more.get("n", 1)

    async def test_while_it_waits_in_the_queue(self, client):
        client.rig.stage.held = True
        socks = [raw_post(client, BODY) for _ in range(6)]
        await until(lambda: client.rig.engine.statistics().queued == 4)  # two run
        for sock in socks:
            sock.close()
        await until(lambda: client.rig.engine.statistics().queued == 0)
        client.rig.stage.release()
        await until(lambda: client.rig.n_busy == 0)

    async def test_while_the_body_comes(self, client):
        host, _, port = client.url.removeprefix("http://").partition(":")
        sock = socket.create_connection((host, int(port)))
        sock.sendall(head(99) + b"{")
        await asyncio.sleep(0.05)
        sock.close()
        await asyncio.sleep(0.05)
        assert (await client.chat())[0] == 200


class TestStreamsStayAlive:
    async def test_a_comment_in_the_silence(self, start):
        client = await start(Rig(settings=ApiSettings(keepalive_s=0.05)))
        client.rig.stage.held = True
        async with client.session.post(client.url + CHAT, json={**BODY, "stream": True, "n": 2}) as response:
            assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
            client.rig.stage.release()
            text = (await response.read()).decode()
        assert text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2] if e.startswith("data: ")]
        for index in range(2):  # a wait that ended without an event lost nothing
            choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(c["delta"].get("content", "") for c in choices) == "Hello!"

    async def test_an_error_after_the_comment_is_an_event(self, start):
        client = await start(Rig(settings=ApiSettings(keepalive_s=0.05)))
        client.rig.stage.held = True
        async with client.session.post(client.url + CHAT, json={**BODY, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            client.rig.lose()
            assert b'"code":"shard_lost"' in (await response.read()).splitlines()[-2]


class TestDrain:
    async def test_running_requests_end_and_connections_close_after_their_next_response(self, client):
        endless(client.rig)
        streaming = asyncio.create_task(client.events(CHAT, {**BODY, "max_tokens": 60}))
        async with client.session.get(client.url + "/health") as kept_alive:
            await kept_alive.read()
        await until(lambda: client.rig.engine.statistics().running == 1)
        client.rig.stage.held = True  # so that the request does not end before all is seen
        draining = asyncio.create_task(drain(client.runner, 100.0))
        await asyncio.sleep(0.02)
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as session:
                await session.post(client.url + CHAT, json=BODY)
        async with client.session.get(client.url + "/health") as last:  # over the connection that stayed open
            assert (last.status, last.headers["Connection"]) == (200, "close")
        client.rig.stage.release()
        assert await draining
        assert (await streaming)[-1] == "[DONE]"

    async def test_what_does_not_end_in_time_gets_an_error(self, client):
        endless(client.rig)
        streaming = asyncio.create_task(client.events(CHAT, BODY))
        whole = asyncio.create_task(client.chat())
        await until(lambda: client.rig.engine.statistics().generated_tokens > 4)
        assert not await drain(client.runner, 0.05)
        assert json.loads((await streaming)[-1])["error"]["code"] == "shutting_down"
        assert (await whole)[0] == 503
        assert client.rig.n_busy == 0

    async def test_twice_is_once(self, client):
        assert await drain(client.runner, 1.0)
        assert await drain(client.runner, 1.0)


class TestDefects:
    """A defect of ours gives a whole 500, or an error event, and never half a body."""

    async def test_before_the_stream(self, client):
        def broken():
            raise ZeroDivisionError("a defect with /secret/path")

        client.rig.context.server.not_ready = broken
        with capture_logs() as logs:
            status, answer = await client.ask("/ready")
        assert status == 500
        assert answer["error"]["code"] == "internal_error"
        assert "secret" not in str(answer)
        assert [e for e in logs if e["log_level"] == "error"]
        assert (await client.ask("/health"))[0] == 200

    async def test_in_a_stream(self, client, monkeypatch):
        endless(client.rig)
        calls = 0
        from lucevisor.api.output import OutputProcessor

        real = OutputProcessor.token

        def breaks(self, event):
            nonlocal calls
            calls += 1
            if calls > 5:
                raise ZeroDivisionError
            return real(self, event)

        monkeypatch.setattr(OutputProcessor, "token", breaks)
        events = await client.events(CHAT, {**BODY, "n": 2})
        assert json.loads(events[-1])["error"]["code"] == "internal_error"
        assert len(events) > 2
        await until(lambda: client.rig.n_busy == 0)


# ---- sockets that were opened elsewhere


def test_a_socket_that_is_bound_as_configured_is_adopted():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert adopt([sock], "127.0.0.1", port) == adopt([sock], "localhost", 0) == [sock]
        assert url_of(sock) == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(("host", "more"), [("127.0.0.2", 0), ("::1", 0), ("127.0.0.1", 1)])
def test_a_socket_that_is_bound_elsewhere_is_refused(host, more):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1] + more
        with pytest.raises(ConfigError, match=r"server\.port.*listens on 127\.0\.0\.1:"):
            adopt([sock], host, port)


@pytest.mark.parametrize(
    ("family", "kind"), [(socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM)]
)
def test_one_of_another_kind_is_refused(family, kind):
    with socket.socket(family, kind) as sock, pytest.raises(ConfigError, match="not a TCP socket"):
        adopt([sock], "127.0.0.1", 0)
