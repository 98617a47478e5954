"""Models, properties, health, readiness and metrics."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lucevisor.api.contexts import NotReadyPart
from tests.api.scripted_model import MODEL, Rig, say
from tests.waiting import until


async def test_models(client):
    supported = {"completions": True, "embeddings": True, "image_input": False, "rerank": True}
    supported |= {"structured_outputs": True, "thinking": True, "tools": True}
    card = {
        "id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "lucevisor", "max_model_len": 512,
        "type": "model", "display_name": MODEL, "created_at": "2023-11-14T22:13:20Z",
        "max_input_tokens": 512, "max_tokens": 512, "status": {"value": "loaded"},
        "capabilities": {name: {"supported": here} for name, here in supported.items()},
    }  # fmt: skip
    found = {"object": "list", "data": [card], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    assert await client.ask("/v1/models") == (200, found)
    assert await client.ask(f"/v1/models/{MODEL}") == (200, card)
    assert await client.ask("/v1/models/scripted%2Fdemo") == (200, card)
    status, answer = await client.ask("/v1/models/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_props(client):
    _, props = await client.ask("/props")
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["total_slots"] == 4
    assert "messages" in props["chat_template"]
    assert "<|im_end|>" in props["eos_tokens"]


def n_asked(client):
    now = client.rig.engine.statistics()
    return now.running + now.queued


async def test_slots(client):
    free = {"n_ctx": 512, "is_processing": False}
    assert await client.ask("/slots?fail_on_no_slot=1") == (200, [{"id": i, **free} for i in range(4)])
    client.rig.stage.held = True
    asked = [asyncio.create_task(client.chat(max_tokens=1)) for _ in range(3)]
    await until(lambda: n_asked(client) == 3)
    _, slots = await client.ask("/slots?fail_on_no_slot=0")
    assert [slot["is_processing"] for slot in slots] == [True, True, True, False]
    asked.append(asyncio.create_task(client.chat(max_tokens=1)))
    await until(lambda: n_asked(client) == 4)
    status, answer = await client.ask("/slots?fail_on_no_slot=0")
    assert (status, answer["error"]["code"]) == (503, "no_slot")
    assert (await client.ask("/slots"))[0] == 200
    client.rig.stage.release()
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}


async def test_health_and_ready(client):
    assert await client.ask("/ready") == (200, {"status": "ready"})
    client.rig.waiting_for = [NotReadyPart("group left", "loading", "reads weights")]
    status, answer = await client.ask("/ready")
    assert status == 503
    assert answer["not_ready"] == [{"name": "group left", "state": "loading", "reason": "reads weights"}]
    assert await client.ask("/health") == (200, {"status": "ok"})


async def families(client, accept="text/plain"):
    async with client.session.get(client.url + "/metrics", headers={"Accept": accept}) as response:
        assert response.status == 200
        return {f.name: f for f in text_string_to_metric_families(await response.text())}


def value(found, name, **labels):
    family = found[name.removesuffix("_total")]
    of_a_model = {**labels, "model": "scripted/demo"}
    (sample,) = [s for s in family.samples if s.name == name and s.labels in (labels, of_a_model)]
    return sample.value


async def test_metrics_count_what_happened(client):
    client.rig.stage.script = say("one two three")
    _, answer = await client.chat()
    await client.chat(temperature=9)
    found = await families(client)
    assert value(found, "lucevisor_requests_total", code="200") == 1
    assert value(found, "lucevisor_requests_total", code="400") == 1
    assert value(found, "lucevisor_prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert value(found, "lucevisor_generated_tokens_total") == answer["usage"]["completion_tokens"]
    samples = {s.name: s.value for f in found.values() for s in f.samples if s.labels.keys() <= {"model"}}
    assert samples["lucevisor_time_to_first_token_seconds_count"] == samples["lucevisor_queue_seconds_count"] == 1
    assert samples["lucevisor_inter_token_seconds_count"] == answer["usage"]["completion_tokens"] - 2
    assert value(found, "lucevisor_group_state", group="left", state="ready") == 1
    assert value(found, "lucevisor_group_state", group="right", state="ready") == 0
    assert value(found, "lucevisor_daemon_restarts_total", group="left", reason="exited") == 2
    n_steps = answer["usage"]["completion_tokens"]
    for name, each in (("step", 0.25), ("stage_wait", 0.125)):
        told = {s.name: s.value for s in found[f"lucevisor_{name}_seconds"].samples}
        assert told[f"lucevisor_{name}_seconds_count"] >= n_steps
        assert told[f"lucevisor_{name}_seconds_sum"] == each * told[f"lucevisor_{name}_seconds_count"]


async def test_metrics_of_drafts(client):
    drafts = client.rig.engine.core.scheduler.drafting.statistics
    drafts.drafted(3, 1.0, 0.5)
    drafts.drafted(0, 0.0, 0.25)
    drafts.verify_s += 2.0
    drafts.decoded(3, 2, looked_up=False)
    found = await families(client)
    expected = {
        "draft_steps": 1,
        "draft_tokens": 3,
        "draft_upkeep_seconds": 0.25,
        "verify_slices": 1,
        "verified_tokens": 3,
        "accepted_tokens": 2,
        "draft_seconds": 0.5,
        "verify_seconds": 2,
    }
    for name, count in expected.items():
        assert value(found, f"lucevisor_{name}_total") == count
    for position, n_accepted in enumerate([1, 1, 0]):
        assert value(found, "lucevisor_verified_tokens_per_position_total", position=str(position)) == 1
        assert value(found, "lucevisor_accepted_tokens_per_position_total", position=str(position)) == n_accepted


async def test_gauges_of_running_and_queued_requests(client):
    client.rig.stage.held = True
    asked = [asyncio.create_task(client.chat(max_tokens=1)) for _ in range(6)]
    await until(lambda: client.rig.engine.statistics().queued == 4)
    found = await families(client)
    client.rig.stage.release()
    await asyncio.gather(*asked)
    assert value(found, "lucevisor_requests_running") == 2  # as many as steps are in flight
    assert value(found, "lucevisor_requests_queued") == 4
    assert value(found, "lucevisor_pages", space="recurrent", where="sequences") == 2
    assert value(found, "lucevisor_pages", space="recurrent", where="free") == 2


async def test_metrics_before_there_is_an_engine(start):
    client = await start(Rig(attach=False, engine=None))
    assert "lucevisor_group_state" in await families(client)


PLAIN, OPEN = "text/plain", "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        (OPEN, OPEN),
        ("application/openmetrics-text;version=zz", OPEN),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3", OPEN),
        ("text/plain;version=99999999999.1;escaping=values", PLAIN),
        ("text/plain;version=\u00b2;q=\u0662", PLAIN),
        (";;;=,=;q", PLAIN),
    ],
)
async def test_any_accept_header_gets_metrics(client, accept, kind):
    async with client.session.get(client.url + "/metrics", headers={"Accept": accept}) as response:
        assert response.status == 200
        assert response.content_type == kind
        assert (await response.text()).endswith("# EOF\n") == (kind == OPEN)
