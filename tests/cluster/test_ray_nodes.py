"""The choice of a node, without Ray."""

from __future__ import annotations

import socket

import pytest

from lucevisor.cluster.ray_nodes import Node, Place, RayError, describe_resources, find_node


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.2", Place("10.0.0.2", {})),
        ("GPU=1,amd=0.5", Place("", {"GPU": 1.0, "amd": 0.5})),
        ("attic, GPU=2", Place("attic", {"GPU": 2.0})),
    ],
)
def test_places(text, place):
    assert Place.parse(text) == place


@pytest.mark.parametrize("text", ["", "attic,cellar", "GPU=", "GPU=x", "GPU=0", "GPU=nan", "GPU=inf", "=1", "attic,"])
def test_what_is_no_place_is_refused(text):
    with pytest.raises(RayError, match=r"^(names no single node|has '.*', which is no resource); write "):
        Place.parse(text)


def node(address: str, number: int = 0, port: int = 1, **resources: float) -> Node:
    return Node(f"id{number}", address, port, (f"name{number}", address), resources)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "name1", "id1", "localhost"])
def test_a_node_has_an_address_names_and_an_id(host, port):
    assert find_node([node("10.0.0.9"), node("127.0.0.1", 1, port)], host).id == "id1"


def test_after_a_restart_the_node_that_answers_is_taken(port):
    nodes = [node("127.0.0.1", 1), node("127.0.0.1", 2, port), node("127.0.0.1", 3)]
    assert find_node(nodes, "127.0.0.1").id == "id2"


def test_refusals():
    nodes = [node("127.0.0.1", 1), node("127.0.0.2", 1)]
    with pytest.raises(
        RayError,
        match=r"'10.0.0.3': it has 127.0.0.1 \(name1\), 127.0.0.2 \(name1\); `lucevisor cluster join` there adds it",
    ):
        find_node(nodes, "10.0.0.3")
    with pytest.raises(RayError, match=r"names 2 nodes of the Ray cluster; name one address of 127.0.0.1, 127.0.0.2$"):
        find_node(nodes, "name1")
    with pytest.raises(RayError, match=r"127.0.0.2 does not answer at 127.0.0.2:1$"):
        find_node(nodes, "127.0.0.2")


def test_resources_are_shown_as_groups_ask_for_them():
    some = {"CPU": 8.0, "GPU": 1.0, "amd": 0.5, "memory": 1e9, "node:10.0.0.2": 1.0, "object_store_memory": 1e8}
    assert describe_resources(node("10.0.0.2", **some).asked_for) == "CPU=8,GPU=1,amd=0.5"
