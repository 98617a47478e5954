"""A Ray cluster of network namespaces, for tests: its head beside the supervisor, and a node on each host.

`LUCEVISOR_RAY_PYTHON` is an interpreter that has Ray and lucevisor's own dependencies (`make ray`).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import Hosts, hosts, needs_namespaces
from tests.waiting import wait_until

PYTHON = os.environ.get("LUCEVISOR_RAY_PYTHON", "")
HEAD = ""
"""The name of the supervisor's own host."""

needs_ray = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    needs_namespaces,
    pytest.mark.skipif(not PYTHON, reason="LUCEVISOR_RAY_PYTHON names no interpreter that has Ray: `make ray`"),
]

SMALL = ("--num-cpus=1", "--object-store-memory=100000000", "--include-log-monitor=false")
PATH = f"{Path(PYTHON).parent}:{os.environ['PATH']}"


@dataclass
class RayCluster:
    """Nodes by the name of their host."""

    hosts: Hosts
    folder: Path
    resources: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=lambda: {**os.environ, "PATH": PATH})

    def __post_init__(self) -> None:
        with socket.create_server((self.hosts.listen, 0)) as free:
            self.port = free.getsockname()[1]

    @property
    def address(self) -> str:
        return f"{self.hosts.listen}:{self.port}"

    def start(self, name: str) -> None:
        """Start a host's node, unless it runs."""
        if self.processes(name):
            return
        address = self.hosts.address(name) if name else self.hosts.listen
        options = ["start", "--head", f"--port={self.port}", "--include-dashboard=false"]
        if name:
            options = ["start", f"--address={self.address}"]
        options += [f"--node-ip-address={address}", "--disable-usage-stats", f"--temp-dir={self._folder(name)}"]
        options += [f"--resources={self.resources[name]}"] if name in self.resources else []
        ray = [str(Path(PYTHON).with_name("ray")), *options, *SMALL]
        done = subprocess.run(self.inside(name, ray), env=self.env, capture_output=True, text=True, check=False)
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

    def restart(self, name: str) -> None:
        """Start a host's node again, after all of the former have ended."""
        for process in self.processes(name):
            with suppress(psutil.Error):
                process.kill()
        wait_until(lambda: not self.processes(name), 20.0, f"Ray's processes of {name!r} end")
        self.start(name)

    def close(self) -> None:
        for name in (HEAD, *self.hosts.names):
            with suppress(AssertionError):
                self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _folder(self, name: str) -> Path:
        return self.folder / (name or "head")


@contextmanager
def ray_cluster(*names: str, folder: Path, resources: dict[str, str] | None = None) -> Iterator[RayCluster]:
    """A head and a node on each host; ``resources`` as Ray takes them."""
    with hosts(*names, folder=folder, prefix="ray", subnet="10.211.8") as made:
        # Ray's sockets are in there, and the path of a socket has 107 bytes at most.
        cluster = RayCluster(made, Path(tempfile.mkdtemp(prefix="ray-")), resources or {})
        try:
            for name in (HEAD, *names):
                cluster.start(name)
            yield cluster
        finally:
            cluster.close()
