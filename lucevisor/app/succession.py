"""One supervisor after another: `lucevisor start --take-over` beside a running one of the same name.

Joins :mod:`lucevisor.app.handover` with the service, the endpoint, the run directory and systemd.  Invariant: at any
time one supervisor holds the name, and at least one accepts connections.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import structlog

from lucevisor.api.listening import adopt, listen
from lucevisor.app.endpoint import Endpoint
from lucevisor.app.handover import HandoverServer, Offer, Request, Taken, take
from lucevisor.app.rundir import RunDirectory
from lucevisor.app.systemd import Notifier, SystemdReport, watchdog_s
from lucevisor.config import ServerConfig
from lucevisor.deployment.service import SAVE_S, Service
from lucevisor.errors import LucevisorError, unusable

log = structlog.get_logger("lucevisor.handover")


class Succession:
    """``drain_s``: how long a supervisor that is taken over from has to finish its requests; None: there is none."""

    def __init__(
        self,
        service: Service,
        endpoint: Endpoint,
        run_dir: RunDirectory,
        report: SystemdReport,
        drain_s: float | None,
        on_drained: Callable[[], None],
    ) -> None:
        self.pending = drain_s is not None
        self._service, self._endpoint, self._run_dir, self._report = service, endpoint, run_dir, report
        self._drain_s = drain_s or 0.0
        self._on_drained = on_drained
        self._server = HandoverServer(run_dir.handover, self)
        self._tasks: list[asyncio.Task[None]] = []

    def offer_it(self) -> None:
        """Let another supervisor take over from now on."""
        try:
            self._server.open()
        except OSError as error:
            raise unusable(self._run_dir.path, error) from error

    async def offer_again(self) -> None:
        """Listen again after the run directory was removed."""
        await self._server.close()
        self.offer_it()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()

    # ---- the new one

    async def take_over(self, server: ServerConfig) -> None:
        """Serve on the sockets of the supervisor that runs, under its name; on sockets of its own if that has ended.

        Raises LucevisorError, which changes nothing for the other one.
        """
        taken = await take(self._run_dir.handover, Request(os.getpid(), self._drain_s))
        if taken is None:
            log.info("the other supervisor has ended", name=self._run_dir.name)
            self._run_dir.claim()
            await self._endpoint.open_admin()
            await self._endpoint.open(listen(server.host, server.port))
        else:
            try:
                sockets = adopt(taken.sockets, server.host, server.port)
            except LucevisorError:
                taken.decline()
                raise
            await self._endpoint.open(sockets)
            await self._endpoint.open_admin()
            await taken.serving()
            self._run_dir.adopt(taken.lock)
            if taken.offer.notify_socket:
                environ = {"NOTIFY_SOCKET": taken.offer.notify_socket, "WATCHDOG_USEC": taken.offer.watchdog_usec}
                self._report.use(Notifier(environ), watchdog_s(environ))
            log.info("taken over", name=self._run_dir.name, from_pid=taken.offer.pid)
            self._tasks.append(asyncio.create_task(self._watch_saves(taken), name="saves of the other supervisor"))
        self.pending = False
        self.offer_it()

    async def _watch_saves(self, taken: Taken) -> None:
        """Use what the other supervisor saves while it ends."""
        async for _ in taken.saves():
            if self._service.snapshots is not None:
                await asyncio.to_thread(self._service.snapshots.store.scan)
        log.info("the other supervisor has ended", pid=taken.offer.pid)

    # ---- the one that runs (lucevisor.app.handover.Giver)

    def offer(self) -> tuple[Offer, list[int]]:
        """Return what to offer, with the lock of the run directory and the listening sockets."""
        if self._service.state == "draining":
            return Offer(os.getpid(), refused="the running supervisor is stopping"), []
        self._report.reloading()
        notifier = self._report.notifier
        offer = Offer(os.getpid(), notify_socket=notifier.name, watchdog_usec=str(int(1e6 * self._report.watchdog_s)))
        return offer, [self._run_dir.lock, *self._endpoint.sockets]

    def keep(self) -> None:
        """The other supervisor failed: continue as before."""
        self._report.ready()

    def give_up(self, request: Request) -> None:
        """Leave the name to the other one; stop when the running requests have ended."""
        self._report.leave(request.pid)
        self._run_dir.release()
        log.info("handed over", to_pid=request.pid, drain_s=request.drain_s)
        self._tasks.append(asyncio.create_task(self._finish(request.drain_s), name="finish requests"))

    async def save(self) -> None:
        """Save what has been computed until now."""
        await self._service.save_prefixes(SAVE_S)

    async def _finish(self, drain_s: float) -> None:
        ended = await self._endpoint.drain(drain_s)
        log.info("drained", all_ended=ended)
        self._on_drained()


def refuse_without_room(service: Service) -> LucevisorError:
    """Return the error of a new supervisor that did not become ready."""
    return LucevisorError(
        f"not taken over, the running supervisor goes on: {service.reason()}; both must fit at once, else stop it first"
    )
