"""A Ray cluster of network namespaces, for tests: its head beside the supervisor, and a node on each host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import Hosts, hosts, needs_namespaces
from tests.waiting import wait_until

HEAD = ""
"""The name of the supervisor's own host."""

needs_ray = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    needs_namespaces,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: `make ray`"),
]

_SMALL = ("--num-cpus=1", "--include-log-monitor=false")


@dataclass
class RayCluster:
    """Nodes by the name of their host."""

    hosts: Hosts
    folder: Path
    resources: dict[str, Sequence[str]]
    auth: dict[str, str]
    port: int = 0

    @property
    def env(self) -> dict[str, str]:
        return os.environ | self.auth | {"RAY_raylet_start_wait_time_s": "240"}

    @property
    def address(self) -> str:
        return f"{self.hosts.listen}:{self.port}"

    def spread(self, config: str, places: Mapping[str, str] | None = None) -> str:
        """Put groups of a configuration at their places, those of hosts' names at their addresses; add the cluster."""
        self.hosts.secret.write_text("0123456789abcdef" * 4)
        self.hosts.secret.chmod(0o600)
        for group, place in (places or {name: self.hosts.address(name) for name in self.hosts.names}).items():
            head = f"[groups.{group}]\n"
            config = config.replace(head, f'{head}host = "{place}"\npython = "{sys.executable}"\n')
        return (
            f'{config}\n[cluster]\nlisten = "{self.hosts.listen}"\nsecret_file = "{self.hosts.secret}"\n'
            f'launcher = "ray"\nray_address = "{self.address}"\n'
        )

    def start(self, name: str) -> None:
        """Start a host's node, unless it runs."""
        if self.processes(name):
            return
        if not name:
            with socket.create_server((self.hosts.listen, 0)) as free:
                self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "lucevisor", "cluster"]
        command += ["join", self.address] if name else ["start", f"--port={self.port}"]
        command += [f"--address={self.hosts.address(name) if name else self.hosts.listen}"]
        command += [f"--resource={resource}" for resource in self.resources.get(name, ())]
        command += ["--", f"--temp-dir={self._folder(name)}", *_SMALL]
        done = subprocess.run(self.inside(name, command), env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """The command on a host."""
        return ["ip", "netns", "exec", f"{self.hosts.prefix}-{name}", *command] if name else list(command)

    def processes(self, name: str, part: str = "") -> list[psutil.Process]:
        """Ray's processes of a host and all that they started, those with ``part`` in their command line."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(f"{self._folder(name)}/" in argument for argument in process.cmdline()):
                    found |= {one.pid: one for one in [process, *process.children(recursive=True)]}
        result = []
        for process in found.values():
            with suppress(psutil.Error):
                if part in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    result.append(process)
        return result

    def kill(self, name: str, part: str = "") -> None:
        """SIGKILL to what ``processes`` finds."""
        found = self.processes(name, part)
        assert found, f"no process {part!r} of Ray on host {name!r}"
        for process in found:
            with suppress(psutil.Error):
                process.kill()

    def restart(self, *names: str) -> None:
        """Start nodes again, after all of the former have ended."""
        for name in names:
            for process in self.processes(name):
                with suppress(psutil.Error):
                    process.kill()
        for name in names:
            wait_until(lambda name=name: not self.processes(name), 20.0, f"Ray's processes of {name!r} end")
        for name in names:
            self.start(name)

    def close(self) -> None:
        for process in psutil.process_iter():  # Ray's client server is nobody's child, and knows no folder
            with suppress(psutil.Error):
                if any(argument.endswith(f"={self.address}") for argument in process.cmdline()):
                    process.kill()
        for name in (HEAD, *self.hosts.names):
            with suppress(AssertionError):
                self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _folder(self, name: str) -> Path:
        return self.folder / (name or "head")


@contextmanager
def ray_cluster(*names: str, folder: Path, resources: dict[str, Sequence[str]], **auth: str) -> Iterator[RayCluster]:
    """A head and a node on each host; ``resources`` as `--resource` takes them, ``auth`` as Ray's variables say it."""
    with hosts(*names, folder=folder, prefix="ray", subnet="10.211.8") as made:
        # Ray's sockets are in there, and the path of a socket has 107 bytes at most.
        cluster = RayCluster(
            made, Path(tempfile.mkdtemp(prefix="ray-")), resources, auth or {"RAY_AUTH_MODE": "disabled"}
        )
        try:
            for name in (HEAD, *names):
                cluster.start(name)
            yield cluster
        finally:
            cluster.close()
