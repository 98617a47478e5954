"""The document names what the server has, and its schemas take what the server takes."""

from __future__ import annotations

import re

import msgspec
import pytest

from lucevisor.api.dialects.openai_chat import ChatBody
from lucevisor.api.server import create_app
from tests.api.scripted_model import Rig


@pytest.fixture
def client(shared_client):
    return shared_client


async def test_every_route_is_in_it_and_every_path_is_a_route(client):
    _, document = await client.ask("/openapi.json")
    told = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    served = {
        (route.method, route.resource.canonical)
        for route in create_app(Rig().context).router.routes()
        if route.method != "HEAD"
    }
    assert told == served


async def test_references_lead_somewhere(client):
    _, document = await client.ask("/openapi.json")
    names = set(re.findall(r'"#/components/schemas/(\w+)"', msgspec.json.encode(document).decode()))
    assert names
    assert names <= document["components"]["schemas"].keys()


async def test_parameters_are_those_of_the_types(client):
    _, document = await client.ask("/openapi.json")
    chat = document["components"]["schemas"]["ChatBody"]
    assert set(chat["properties"]) == set(ChatBody.__struct_fields__)
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False


async def test_operation_ids_are_unique(client):
    _, document = await client.ask("/openapi.json")
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))
