"""Network namespaces as hosts: two with a cable between them, and code that runs in one.  Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def delete(*names: str) -> None:
    """Delete namespaces, those that are there."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def enter(name: str) -> None:
    """Move this thread, and what it starts, to a namespace."""
    with open(f"/run/netns/{name}") as namespace:
        if LIBC.setns(namespace.fileno(), CLONE_NEWNET):
            raise SystemExit(f"namespace {name} cannot be entered: {os.strerror(ctypes.get_errno())}; run as root")


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Run the block in a namespace: sockets that it makes stay there."""
    with open("/proc/thread-self/ns/net") as before:
        enter(name)
        try:
            yield
        finally:
            LIBC.setns(before.fileno(), CLONE_NEWNET)


@contextlib.contextmanager
def cable(left: str, right: str, network: str = "10.213.7") -> Iterator[tuple[str, str]]:
    """Two namespaces with a veth pair between them; the addresses of its ends."""
    delete(left, right)
    addresses = f"{network}.1", f"{network}.2"
    try:
        for name in (left, right):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", left, "link", "add", "name", "eth0", "type", "veth", "peer", "name", "eth0", "netns", right)
        for name, address in zip((left, right), addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield addresses
    finally:
        delete(left, right)
