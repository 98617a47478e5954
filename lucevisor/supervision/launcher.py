"""Starts daemons, here or on the host of their group, with the supervisor's own sources; use it in the main thread."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from functools import cached_property

import structlog

from lucevisor.config import ClusterConfig, Config, GroupConfig, read_credentials
from lucevisor.errors import ConfigError, LucevisorError
from lucevisor.supervision.child import (
    Child,
    ProcessEnd,
    SpawnError,
    StagedPackages,
    channel_options,
    daemon_arguments,
    environment,
    find_python,
    kill,
    require_main_thread,
    spawn,
    starting_process,
)
from lucevisor.supervision.listener import Listener
from lucevisor.supervision.remote import RemoteChild, launch_command, pack, portable_path, stdin_of


def open_listener(config: Config) -> Listener | None:
    """Listen where daemons of a configuration connect; None where all have socketpairs.  Raises ConfigError.

    A port in use, as of a supervisor that is taken over from, is replaced by a free one.
    """
    cluster = config.cluster
    if all(group.shares_memory for group in config.groups.values()):
        return None
    if not cluster.listen:
        return Listener()
    credentials = read_credentials(cluster)
    try:
        try:
            return Listener(cluster.listen, cluster.port, credentials)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or cluster.port == 0:
                raise
            listener = Listener(cluster.listen, 0, credentials)
            _log.warning("the port is in use", port=cluster.port, instead=listener.address)
            return listener
    except OSError as error:
        why, hint = f"cannot be listened on: {error.strerror or error}", "name an address of this host"
        raise ConfigError("cluster.listen", cluster.listen, why, hint, file=str(config.file)) from None


_log = structlog.get_logger("lucevisor.supervision")


class Launcher:
    """`listener`: where daemons connect without socketpair; with it all listen for rows of neighbours."""

    def __init__(
        self, staging: StagedPackages, listener: Listener | None = None, cluster: ClusterConfig | None = None
    ) -> None:
        self.source_hash = staging.source_hash
        self.listener = listener
        self._staging, self._cluster = staging, cluster or ClusterConfig()

    def launch(
        self,
        config: GroupConfig,
        threads: int,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[ProcessEnd], None],
        n_links: int = 1,
    ) -> Child:
        try:
            self._staging.renew()
        except LucevisorError as error:
            raise SpawnError(str(error), configuration=True) from error
        rows_host = self.listener.host if self.listener is not None else ""
        arguments = daemon_arguments(config, threads, rows_host)
        arguments.append(f"--cache-dir={portable_path(self._cluster.cache_dir)}")
        if config.host:
            return self._launch_remote(config, threads, arguments, on_line, on_exit, n_links)
        if self.listener is not None:
            arguments += [f"--tls={file}" for file in self._tls_files]
        python = find_python(config.python, {**os.environ, **config.environment()}.get("PATH"))
        directory = self._staging.directory
        env = environment(config, threads, directory).added_to(os.environ)
        tcp = not config.shares_memory
        return spawn(
            [python, *arguments], env, directory, on_line, on_exit, n_links=n_links, listener=self.listener, tcp=tcp
        )

    def _launch_remote(
        self,
        config: GroupConfig,
        threads: int,
        arguments: list[str],
        on_line: Callable[[str, str], None],
        on_exit: Callable[[ProcessEnd], None],
        n_links: int,
    ) -> Child:
        require_main_thread()
        assert self.listener is not None  # a host needs [cluster]
        env = environment(config, threads)
        with starting_process() as on_failure:
            awaited, addresses = self.listener.expect(n_links)
            for connection in awaited:
                on_failure.callback(connection.forget)
            order = {
                "hash": self.source_hash,
                "arguments": [*arguments, *channel_options(addresses, n_links)],
                "unset": sorted(env.unset),
                "defaults": dict(env.defaults),
                "env": dict(env.values),
                "secret_file": portable_path(self._cluster.secret_file),
                "tls_files": [portable_path(file) for file in self._tls_files],
            }
            stdin = stdin_of(order, self._archive)
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                launch_command(self._cluster, config),
                cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True,
            )  # fmt: skip
            on_failure.push(lambda *_: kill(process))
            return RemoteChild(
                process, awaited[:n_links], awaited[n_links], on_line, on_exit, awaited[n_links + 1 :], stdin
            )

    @property
    def _tls_files(self) -> list[str]:
        return [self._cluster.tls_cert_file, self._cluster.tls_key_file] if self._cluster.tls_cert_file else []

    @cached_property
    def _archive(self) -> bytes:
        return pack(self._staging)
