"""The status page without a browser: what is served, to whom, under which policy; with one: tests/e2e/test_page.py."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time

import pytest

from lucevisor.api.app_state import ACTIVE
from lucevisor.api.keys import ApiKeys
from lucevisor.config import ApiKey
from lucevisor.errors import LucevisorError
from tests.api.scripted_model import Rig
from tests.waiting import until

RESTART = "/admin/restart"


async def page(client):
    async with client.session.get(client.url + "/") as response:
        return response, await response.text()


def inline(tag, text):
    (found,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found


async def test_the_policy_admits_the_pages_own_script_and_style_only(client):
    response, text = await page(client)
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(inline(tag, text).encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


async def test_with_keys_the_page_is_open_and_says_nothing(start):
    rig = Rig(keys=ApiKeys([ApiKey("s3cret")]), status=lambda: {"name": "box"})
    client = await start(rig)
    response, text = await page(client)
    assert response.status == 200
    assert rig.context.model.name not in text
    assert (await client.ask("/status"))[0] == 401
    good = {"Authorization": "Bearer s3cret"}
    assert await client.ask("/status", headers=good) == (200, {"name": "box", "admin": False})


class TestRestart:
    @pytest.fixture
    async def asked(self):
        return []

    @pytest.fixture
    async def desk(self, start, asked):
        def restart(group, now):
            if group != "left":
                raise LucevisorError(f"there is no group {group!r}: the groups are left")
            asked.append((group, now))

        return await start(
            Rig(keys=ApiKeys([ApiKey("client")]), admin_keys=ApiKeys([ApiKey("admin")]), restart=restart)
        )

    async def test_needs_an_admin_key(self, desk, asked):
        for headers in ({}, {"x-api-key": "client"}, {"x-api-key": "other"}):
            assert (await desk.ask(RESTART, {"group": "left"}, headers=headers))[0] == 401
        assert asked == []
        admin = {"x-api-key": "admin"}
        assert await desk.ask(RESTART, {"group": "left"}, headers=admin) == (202, {"restarting": "left"})
        assert (await desk.ask(RESTART, {"group": "left", "now": True}, headers=admin))[0] == 202
        assert asked == [("left", False), ("left", True)]
        assert (await desk.ask("/v1/models", headers=admin))[0] == 200  # it is an API key too

    async def test_a_wrong_order_is_refused_by_name(self, desk, asked):
        admin = {"x-api-key": "admin"}
        status, answer = await desk.ask(RESTART, {"group": "middle"}, headers=admin)
        assert (status, answer["error"]["code"]) == (409, "not_restarted")
        assert "the groups are left" in answer["error"]["message"]
        for body in ({}, {"group": 3}, {"group": "left", "soon": True}, []):
            assert (await desk.ask(RESTART, body, headers=admin))[0] == 400
        assert asked == []

    async def test_without_admin_keys_nobody_may(self, start, asked):
        client = await start(Rig(restart=lambda *order: asked.append(order)))
        status, answer = await client.ask(RESTART, {"group": "left"}, headers={"x-api-key": ""})
        assert (status, answer["error"]["code"]) == (403, "no_admin_keys")
        assert answer["error"]["type"] == "permission_error"
        assert "server.admin_keys_file" in answer["error"]["message"]
        assert asked == []


async def test_requests_in_flight_are_listed_while_they_run(client):
    active = client.runner.app[ACTIVE]
    client.rig.stage.held = True
    body = {"prompt": "Hi", "max_tokens": 3}
    call = asyncio.create_task(client.ask("/v1/completions", body, headers={"x-request-id": "mine"}))
    await until(lambda: active.generating(time.monotonic()))
    [one] = active.generating(time.monotonic())
    assert (one["id"], one["path"], one["first_token_s"]) == ("mine", "/v1/completions", None)
    assert one["generated_tokens"] == 0
    client.rig.stage.release()
    assert (await call)[0] == 200
    assert active.generating(time.monotonic()) == []
