"""`python -m lucevisor.cluster.ray_exec --host HOST -- COMMAND`: run a command on a node of a Ray cluster, as ssh does.

Standard input, output, errors, signals and the exit status are relayed. What breaks in between is one sentence on
stderr and exit code 255. Any end of this process, SIGKILL too, ends the command on the other node.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from lucevisor.cluster import ray_actor
from lucevisor.cluster.ray_nodes import (
    Place,
    RayError,
    accepts_connections,
    actor_options,
    command_name,
    connect,
    one_line,
)

_BEAT_S = 1.0
_SILENCE_S = 20.0  # without the other side, both give up; the daemon's own connections notice a cut sooner
_JOINED_S = 30.0  # until Ray has connected this process
_STARTED_S = 60.0  # until Ray has a worker, whose interpreter may come from a slow disk
_CHUNK_BYTES = 64 * 1024  # Ray carries up to 100 kB in a call itself
_RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Relay:
    """One command on one node, from its start to its exit status."""

    def __init__(self, host: str, out_fd: int, err_fd: int) -> None:
        self._host, self._out_fd, self._err_fd = host, out_fd, err_fd
        self._ray: Any = None
        self._actor: Any = None
        self._last_word = threading.Lock()

    def run(self, place: Place, address: str, name: str, command: Sequence[str]) -> NoReturn:
        """Start the command and relay until it ends."""
        threading.Thread(target=self._relay_signals, daemon=True).start()
        late = f"cannot connect to the Ray cluster at {address!r} within {_JOINED_S:g} s; does `ray status` here?"
        connecting = threading.Timer(_JOINED_S, self._give_up, [late])
        connecting.daemon = True
        connecting.start()
        try:
            self._ray = ray = connect(address)
            connecting.cancel()
            ray.cloudpickle.register_pickle_by_value(ray_actor)  # the node need not have lucevisor
            options = actor_options(ray, place, 30.0)  # the daemon before may still have the resources
            actor = (
                ray.remote(ray_actor.RemoteProcess)
                .options(name=command_name(name), max_concurrency=6, **options)  # beat, read, write, signals
                .remote(_SILENCE_S)
            )
            failure = ray.get(actor.start.remote(list(command), place.resources.get("GPU", 0) > 0), timeout=_STARTED_S)
            if failure:
                raise RayError(failure)
            self._actor = actor
            for thread in (self._beat, self._watch_head, self._relay_input):
                threading.Thread(target=thread, daemon=True).start()
            self._relay_output()
        except RayError as error:
            self._give_up(str(error))
        except Exception as error:  # Ray's own, of many kinds
            self._give_up(self._explain(error))

    def _beat(self) -> NoReturn:
        while True:
            try:
                self._ray.get(self._actor.beat.remote(), timeout=_SILENCE_S)
            except Exception as error:
                time.sleep(_BEAT_S)  # the command's own end is better news, and on its way
                self._give_up(self._explain(error))
            time.sleep(_BEAT_S)

    def _watch_head(self) -> NoReturn:
        address = self._ray.get_runtime_context().gcs_address
        seen_s = time.monotonic()
        # After 60 s Ray ends this process and the actor's without a word.
        while time.monotonic() - seen_s < 50.0:
            time.sleep(_BEAT_S)
            if accepts_connections(address):
                seen_s = time.monotonic()
        self._give_up(f"{self._host} is lost: Ray's head at {address} does not answer; `ray start --head` starts it")

    def _relay_input(self) -> None:
        more = True
        while more:
            data = os.read(0, _CHUNK_BYTES)
            try:
                more = self._ray.get(self._actor.write.remote(data, not data)) and bool(data)
            except Exception:  # those who read and beat say why
                return

    def _relay_output(self) -> NoReturn:
        status = None
        while status is None:
            out, err, status = self._ray.get(self._actor.read.remote())
            for fd, data in ((self._out_fd, out), (self._err_fd, err)):
                view = memoryview(data)
                try:
                    while view:
                        view = view[os.write(fd, view) :]
                except OSError:  # nobody reads: go on to the end of the command, as its input ends, too
                    continue
        self._last_word.acquire()
        os._exit(status if status >= 0 else 128 - status)

    def _relay_signals(self) -> None:
        while True:
            number = signal.sigwait(_RELAYED)
            if self._actor is None:
                self._last_word.acquire()
                os._exit(128 + number)
            self._actor.signal.remote(int(number))

    def _give_up(self, sentence: str) -> NoReturn:
        self._last_word.acquire()
        os.write(self._err_fd, f"lucevisor: {sentence}\n".encode(errors="replace"))
        # As ssh does; Ray ends the actors of a driver that is gone, and gives back what they had reserved.
        os._exit(255)

    def _explain(self, error: Exception) -> str:
        errors = self._ray.exceptions
        text = str(error)
        if isinstance(error, errors.GetTimeoutError):
            if self._actor is None:
                return f"{self._host}: Ray started no worker there within {_STARTED_S:g} s"
            what = f"no answer for {_SILENCE_S:g} s: the network is cut, or the host hangs"
        elif isinstance(error, errors.ActorUnavailableError):
            what = "the connection to Ray's worker there broke"
        elif "Owner's node" in text:
            what = "Ray's node on this host has died, and Ray ends what it started elsewhere"
        elif "node has died" in text:
            what = "Ray's node there has died"
        elif isinstance(error, errors.ActorDiedError):
            detail = " ".join(text.split("Worker exit detail:")[-1].split(" Some common causes")[0].split())
            what = f"Ray's worker process there has died: {detail[:300]}"
        else:
            what = f"{type(error).__name__}: {one_line(error)}"
        return f"{self._host} is lost: {what}"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser("python -m lucevisor.cluster.ray_exec", description="Run a command on a Ray node.")
    parser.add_argument("--address", default="auto", help="address of the Ray cluster; auto is the node of this host")
    parser.add_argument("--host", required=True, help="address or name of a node, resources (GPU=1,amd=1), or both")
    parser.add_argument("--name", default="command", help="name of the command in `lucevisor cluster status`")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        place = Place.parse(options.host)
    except RayError as error:
        parser.error(f"--host {options.host!r} {error}")
    signal.pthread_sigmask(signal.SIG_BLOCK, _RELAYED)  # before Ray starts threads, which inherit it
    relay = _Relay(options.host, os.dup(1), os.dup(2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)  # Ray prints pages of advice for each loss; its own log files have them, too
    relay.run(place, options.address, options.name, options.command)


if __name__ == "__main__":
    main(sys.argv[1:])
