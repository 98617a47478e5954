"""Hosts for tests: network namespaces of this machine with addresses of their own, on one bridge.

They share files and processes with the supervisor, and no network but the bridge.  `ssh` is a script that runs its
command in a namespace, behind a process of its own that relays nothing but the exit code, as a killed ssh would end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.certificates import make_certificate

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
)

SSH = """#!/bin/sh
host=$1
shift
exec 3<&0
ip netns exec {prefix}-$host sh -c "$*" <&3 3<&- &
exec 3<&- </dev/null
trap 'kill $!' TERM
wait $!
"""


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


@dataclass(frozen=True)
class Hosts:
    """``names``, and the address of the supervisor's host, on the bridge."""

    prefix: str
    names: Sequence[str]
    folder: Path
    subnet: str

    @property
    def listen(self) -> str:
        return f"{self.subnet}.1"

    def address(self, name: str) -> str:
        return f"{self.subnet}.{2 + list(self.names).index(name)}"

    def cut(self, name: str, *, cut: bool = True) -> None:
        """Cut the host's cable, or mend it: packets are lost, nobody is notified."""
        ip("link", "set", f"{self.prefix}-{name}", "down" if cut else "up")

    @property
    def secret(self) -> Path:
        return self.folder / "secret"

    def config(self, groups: Sequence[str], *, tls: bool = False) -> str:
        """The sections of a cluster, and of one cpu group of each name, on the host of that name if there is one."""
        text = "".join(f'[groups.{group}]\nbackend = "cpu"\nthreads = 1\n' for group in groups)
        return self.spread(text, tls=tls)

    def spread(self, config: str, *, tls: bool = False) -> str:
        """Put each group of a configuration on the host of its name, if there is one, and add the cluster."""
        self.secret.write_text("0123456789abcdef" * 4)
        self.secret.chmod(0o600)
        ssh = self.folder / "ssh"
        ssh.write_text(SSH.format(prefix=self.prefix))
        ssh.chmod(0o700)
        for name in self.names:
            head = f"[groups.{name}]\n"
            config = config.replace(head, f'{head}host = "{name}"\npython = "{sys.executable}"\n')
        config += f'\n[cluster]\nlisten = "{self.listen}"\nsecret_file = "{self.secret}"\nssh = ["{ssh}"]\n'
        if tls:
            cert, key = make_certificate(self.folder)
            config += f'tls_cert_file = "{cert}"\ntls_key_file = "{key}"\n'
        return config


@contextmanager
def hosts(*names: str, folder: Path, prefix: str = "", subnet: str = "") -> Iterator[Hosts]:
    """Make a namespace for each name; all are removed at the end.

    Without ``prefix`` and ``subnet``, names and addresses are those of this process, as other tests may run beside it.
    """
    pid = os.getpid()
    prefix, subnet = prefix or f"net{pid % 4096:x}", subnet or f"10.{212 + pid % 40}.{pid // 40 % 250}"
    made = Hosts(prefix, names, folder, subnet)
    bridge = f"{prefix}-bridge"
    try:
        _remove(made, bridge)
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{made.listen}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for name in names:
            space, port = f"{prefix}-{name}", f"{prefix}-{name}"
            ip("netns", "add", space)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", port, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{made.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield made
    finally:
        _remove(made, bridge)


def _remove(made: Hosts, bridge: str) -> None:
    for name in made.names:
        ip("netns", "del", f"{made.prefix}-{name}", check=False)
        ip("link", "del", f"{made.prefix}-{name}", check=False)
    ip("link", "del", bridge, check=False)
