"""Connection to a Ray cluster, its nodes, and the choice of one for a command.

A place is written `ADDRESS`, as resources to reserve (`GPU=1,amd=1`), or as both.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMESPACE = "lucevisor"
"""Namespace of the actors, where `lucevisor cluster status` finds them."""

INSTALL = f"{sys.executable} -m pip install 'lucevisor[ray]'"


class RayError(Exception):
    """What failed, and what to do."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(f"{why}; {hint}" if hint else why)
        self.why, self.hint = why, hint


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command is to run: a node, by address or name, resources, or both."""

    host: str
    resources: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read `ADDRESS`, `NAME=AMOUNT,...`, or both. Raises RayError."""
        hosts, resources = [], {}
        for part in text.split(","):
            name, equals, amount = part.strip().partition("=")
            if not equals:
                hosts.append(name)
                continue
            try:
                resources[name] = float(amount)
            except ValueError:
                resources[name] = -1.0
            if not name or not 0 < resources[name] < math.inf:
                raise RayError(f"has {part.strip()!r}, which is no resource", "write NAME=AMOUNT, such as GPU=1")
        if len(hosts) > 1 or "" in hosts:
            raise RayError(
                "names no single node", "write an address, resources (GPU=1,amd=1), or both (10.0.0.2,GPU=1)"
            )
        return cls(hosts[0] if hosts else "", resources)


@dataclass(frozen=True, slots=True)
class Node:
    """A node that Ray counts as alive."""

    id: str
    address: str
    port: int
    names: tuple[str, ...]
    resources: Mapping[str, float]

    @property
    def raylet(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def asked_for(self) -> dict[str, float]:
        own = {name: amount for name, amount in sorted(self.resources.items()) if not name.startswith("node:")}
        return {name: amount for name, amount in own.items() if name not in ("memory", "object_store_memory")}


def ray_environment() -> dict[str, str]:
    """Return what Ray's processes are to have in their environment, unless it is there.

    Ray uses a token that it finds for some of its commands only, and then others are refused.
    """
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    has_token = bool(token) or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
    wanted = {"RAY_worker_niceness": "0"} | ({"RAY_AUTH_MODE": "token"} if has_token else {})  # or daemons get nice 15
    return {name: value for name, value in wanted.items() if name not in os.environ}


def import_ray() -> Any:
    os.environ.update(ray_environment())
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # or Ray would send the working directory to the nodes
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or it warns
    try:
        import ray
    except ImportError as error:
        raise RayError(f"the package ray cannot be imported ({error})", INSTALL) from error
    return ray


def connect(address: str) -> Any:
    """Return the package ray, connected as a driver to the node of this host. Raises RayError."""
    ray = import_ray()
    if address.startswith("ray://"):
        hint = "join this host to the cluster, and name HEAD:PORT"
        raise RayError(f"{address!r} is Ray's client protocol, which ends no commands", hint)
    if address != "auto" and not accepts_connections(address):
        raise RayError(f"no Ray cluster answers at {address!r}", "`lucevisor cluster start` starts one")
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level="CRITICAL",
        )
    except Exception as error:
        hint = "if it has a token, this host needs ~/.ray/auth_token of its head, too"
        raise RayError(f"cannot connect to the Ray cluster at {address!r}: {one_line(error)}", hint) from error
    return ray


def accepts_connections(address: str) -> bool:
    """True if a part of Ray answers at HOST:PORT. Ray itself counts one as alive for up to a minute after its end."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 2.0).close()
    except (OSError, ValueError):
        return False
    return True


def alive_nodes(ray: Any) -> list[Node]:
    nodes = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerPort"],
            (node["NodeManagerHostname"], node["NodeName"]),
            node["Resources"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.id))


@dataclass(frozen=True, slots=True)
class Command:
    """A command on a node: its process there, and the one that started it."""

    name: str
    pid: int
    started_by_host: str
    started_by_pid: int


def command_name(name: str) -> str:
    return f"{name}/{socket.gethostname()}/{os.getppid()}/{uuid.uuid4().hex[:8]}"


def running_commands(ray: Any) -> dict[str, list[Command]]:
    """Return the commands that answer, by the ids of their nodes."""
    from ray.util import list_named_actors

    actors = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    found: dict[str, list[Command]] = {}
    for actor in sorted(actors):
        name, host, starter, _ = actor.rsplit("/", 3)
        with contextlib.suppress(Exception):  # it has just ended, or its node hangs
            node, pid = ray.get(ray.get_actor(actor).describe.remote(), timeout=5.0)
            found.setdefault(node, []).append(Command(name, pid, host, int(starter)))
    return found


def find_node(nodes: Sequence[Node], host: str) -> Node:
    """Return the node with this address, name or id. Raises RayError."""
    candidates = [node for node in nodes if host in (node.address, node.id)]
    candidates = candidates or [node for node in nodes if host in node.names]
    if not candidates:
        candidates = _resolved(nodes, host)
    if not candidates:
        known = ", ".join(f"{node.address} ({node.names[0]})" for node in nodes)
        hint = "`lucevisor cluster join` there adds it"
        raise RayError(f"no node of the Ray cluster is {host!r}: it has {known}", hint)
    if len({node.address for node in candidates}) > 1:
        addresses = ", ".join(node.address for node in candidates)
        raise RayError(f"{host!r} names {len(candidates)} nodes of the Ray cluster", f"name one address of {addresses}")
    # After a restart, the former node of the same address is in the list until Ray misses it.
    found = next((node for node in candidates if accepts_connections(node.raylet)), None)
    if found is None:
        raise RayError(f"Ray's node {host} does not answer at {candidates[0].raylet}")
    return found


def _resolved(nodes: Sequence[Node], host: str) -> list[Node]:
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return []
    return [node for node in nodes if node.address in addresses]


def actor_options(ray: Any, place: Place, timeout_s: float) -> dict[str, Any]:
    """Return Ray's options that put an actor on the place, and reserve its resources. Raises RayError."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    nodes = alive_nodes(ray)
    node = find_node(nodes, place.host) if place.host else None
    if not place.resources:
        assert node is not None
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}
    bundle = dict(place.resources)
    if node is not None:
        bundle[f"node:{node.address}"] = 0.001  # of which every node has 1
    group = placement_group([bundle], strategy="STRICT_PACK")
    if not group.wait(timeout_s):
        wanted = describe_resources(place.resources)
        have = "; ".join(f"{node.address}: {describe_resources(node.asked_for)}" for node in nodes)
        where = f"node {place.host}" if place.host else "no node of the Ray cluster"
        verb = "has not" if place.host else "has"
        raise RayError(f"{where} {verb} {wanted} free within {timeout_s:g} s", f"nodes have in all: {have}")
    options: dict[str, Any] = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0)}
    if "memory" in bundle:
        options["memory"] = bundle.pop("memory")
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return options | {"resources": bundle, "scheduling_strategy": strategy}


def describe_resources(resources: Mapping[str, float]) -> str:
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items()) or "no resources"


def one_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
