"""Preprocesses long bodies in worker processes, so that no client can block the event loop by holding the GIL.

Decoding 16 MB of JSON holds the GIL for seconds in any thread, and templates and pre-tokenizers take as long as their
input demands.  So the raw body goes to a worker, and what comes back is bounded: an error, a short response, or token
ids that fit the context.  A worker that exceeds its memory or time is killed, and its request rejected; one that dies
otherwise (the kernel is out of memory, an operator's signal) costs no request: another worker gets the body once.
Knows processes and their protocol, no endpoint; worker.py is the other end.
Invariant: a worker has one body at a time; bodies up to SHORT_BYTES never wait for longer ones only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import msgspec
import structlog

from lucevisor.api.errors import ApiError, unavailable
from lucevisor.api.ports import Ports, SamplingDefaults
from lucevisor.api.prepared import BodyKind, EncodedResponse, GenerationOptions, PreparedRequest
from lucevisor.kv.tokens import TOKEN_BYTES, TokenBuffer
from lucevisor.text.preamble import Normalise

SHORT_BYTES: Final = 256 * 1024
"""Bodies up to this size may use either worker, longer ones only the first."""

JOB: Final = struct.Struct("!BIQ")
"""To the worker: index of the kind, max_context, length of the body that follows."""

REPLY: Final = struct.Struct("!BQ")
"""From the worker: an outcome and the length of the record that follows; after PREPARED, the ids of the prompts."""

KINDS: Final[tuple[BodyKind, ...]] = get_args(BodyKind)
READY, PREPARED, ANSWER, REFUSED, DEFECT = range(5)

OUT_OF_MEMORY: Final = 75
"""Exit code of a worker whose body takes more memory than its limit."""
_TOO_LITTLE_MEMORY: Final = (OUT_OF_MEMORY, -signal.SIGABRT)  # native code aborts when an allocation fails

_PART_BYTES: Final = 256 * 1024  # of a long answer: 10 MB in one piece take 10 ms to copy
_LONG_PROMPT: Final = 4096  # ids; the loop gets a turn after each prompt as long as this
_TOO_MUCH: Final = "the body takes more than {what} to process; send less"

T = TypeVar("T")

log = structlog.get_logger("lucevisor.api")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker, sent once.  ``metadata``: the tokenizer part of the model's GGUF header."""

    metadata: dict[str, Any]
    model: str
    defaults: SamplingDefaults
    direct_defaults: SamplingDefaults | None
    efforts: dict[str, int]
    banned: tuple[int, ...]
    normalise: Normalise
    memory_bytes: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A serialised ApiError."""

    status: int
    message: str
    code: str | None
    param: str | None
    headers: dict[str, str]


class PreparedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The options, and the number of ids of each prompt.

    ``tools``: those of the options, as JSON: their numbers may be larger than any other encoding has.
    """

    options: GenerationOptions
    tools: bytes
    lengths: list[int]


class WorkerLost(Exception):
    """The worker died, or was killed, while it had a body."""


class Preprocessor:
    """The preprocessing workers of one server; the first is started by the first long body, or by `start`."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """Take the metadata of the GGUF header, as the file itself may have changed by the time it is needed."""
        self._metadata = {key: value for key, value in metadata.items() if key.startswith(("tokenizer.", "general."))}
        self._setup: int | None = None  # descriptor of a memfd
        self._workers: list[_Worker | None] = [None, None]
        self._waiting: deque[tuple[asyncio.Future[int], int]] = deque()
        self._free = {0, 1}
        self._jobs: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, ports: Ports) -> None:
        """Start the first worker, so that the first long body does not wait for it."""
        self._add(self._start(ports))

    async def read(self, kind: BodyKind, body: Sequence[bytes], ports: Ports) -> PreparedRequest | EncodedResponse:
        """Return the request prepared from a body, or the response to it; raises ApiError."""
        size = sum(map(len, body))
        index = await self._acquire(size, ports)
        # If the client disconnects, let the worker finish: restarting it costs more.
        job = self._add(self._run(index, kind, body, size, ports))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if self._closed and job.cancelled():
                raise _closing(ports) from None
            raise

    async def close(self) -> None:
        """Kill the workers; the bodies they have are lost."""
        self._closed = True
        while self._waiting:
            turn, _ = self._waiting.popleft()
            turn.cancel()
        for job in list(self._jobs):
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for index, process in enumerate(self._workers):
            if process is not None:
                self._workers[index] = None
                await process.end()
        if self._setup is not None:
            os.close(self._setup)
            self._setup = None

    def _add(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        job.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieve it, as no caller may be left
        return job

    async def _start(self, ports: Ports) -> None:
        index = await self._acquire(SHORT_BYTES + 1, ports)
        try:
            await self._ready(index, ports)
        except (WorkerLost, OSError) as error:
            await self._drop(index)
            log.error("preprocessing worker failed to start", reason=str(error))
        finally:
            self._release(index)

    async def _acquire(self, size: int, ports: Ports) -> int:
        """Wait for a free worker for a body of this size; return its index."""
        index = self._fitting(size)
        if index is None:
            if len(self._waiting) >= ports.settings.max_waiting_bodies:
                raise ApiError(
                    429,
                    f"{len(self._waiting)} long requests are waiting to be processed; try again in a second",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, size))
            try:
                index = await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(turn.result())
                if self._closed and turn.cancelled():
                    raise _closing(ports) from None
                raise
        else:
            self._free.discard(index)
        return index

    def _fitting(self, size: int) -> int | None:
        candidates = (0, 1) if size <= SHORT_BYTES else (0,)
        return next((index for index in candidates if index in self._free), None)

    def _release(self, index: int) -> None:
        """Hand the worker to the first waiting body that may use it."""
        self._free.add(index)
        for entry in list(self._waiting):
            turn, size = entry
            if turn.done():
                self._waiting.remove(entry)
            elif self._fitting(size) == index:
                self._waiting.remove(entry)
                self._free.discard(index)
                turn.set_result(index)
                return

    async def _run(
        self, index: int, kind: BodyKind, body: Sequence[bytes], size: int, ports: Ports
    ) -> PreparedRequest | EncodedResponse:
        try:
            try:
                return await self._run_once(index, kind, body, size, ports)
            except WorkerLost as lost:
                log.warning("preprocessing worker died", reason=str(lost), body_bytes=size, next="another one")
                return await self._run_once(index, kind, body, size, ports)
        except WorkerLost as lost:
            log.error("preprocessing worker died", reason=str(lost), body_bytes=size)
            message = f"two processes in a row that prepared this request were lost: {lost}; try again later"
            raise unavailable(message, ports.settings.retry_after_s, "not_ready") from None
        except OSError as error:  # no memory or descriptors for another worker
            await self._drop(index)
            log.error("preprocessing worker failed to start", reason=str(error))
            message = f"long requests cannot be processed now: {error.strerror}; try again later"
            raise unavailable(message, ports.settings.retry_after_s, "not_ready") from None
        except asyncio.CancelledError:
            await self._drop(index)
            raise
        finally:
            self._release(index)

    async def _run_once(
        self, index: int, kind: BodyKind, body: Sequence[bytes], size: int, ports: Ports
    ) -> PreparedRequest | EncodedResponse:
        """Raises WorkerLost when the worker died of something else than its limits."""
        try:
            worker = await self._ready(index, ports)
            async with asyncio.timeout(ports.settings.preprocess_timeout_s):
                return await worker.run(kind, body, size, ports.max_prompt)
        except TimeoutError:
            await self._drop(index)
            raise _too_much(f"{ports.settings.preprocess_timeout_s:g} s") from None
        except WorkerLost as lost:
            status = await self._drop(index)
            if status in _TOO_LITTLE_MEMORY:
                log.warning("preprocessing worker died", reason="its memory", body_bytes=size)
                raise _too_much(f"{ports.settings.preprocess_memory_bytes >> 20} MiB of memory") from None
            how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
            raise WorkerLost(f"{lost} with {how}") from None

    async def _ready(self, index: int, ports: Ports) -> _Worker:
        if self._closed:
            raise _closing(ports)
        process = self._workers[index]
        if process is None:
            if self._setup is None:
                self._setup = _memory_file(msgspec.msgpack.encode(self._setup_of(ports)))
            process = self._workers[index] = _Worker(self._setup)
            await process.begin()
        return process

    async def _drop(self, index: int) -> int:
        """End the worker; return its exit status, 0 without one."""
        process, self._workers[index] = self._workers[index], None
        return 0 if process is None else await process.end()

    def _setup_of(self, ports: Ports) -> Setup:
        return Setup(
            metadata=self._metadata,
            model=ports.model.name,
            defaults=ports.defaults,
            direct_defaults=ports.direct_defaults,
            efforts=dict(ports.efforts),
            banned=ports.banned,
            normalise=ports.settings.normalise,
            memory_bytes=ports.settings.preprocess_memory_bytes,
        )


class _Worker:
    """One worker process and the socket to it.  It exits when the socket is closed."""

    def __init__(self, setup: int) -> None:
        """Spawn the process; raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "lucevisor.api.prompts.worker", str(theirs.fileno()), str(setup)],
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), setup),
                    start_new_session=True,  # Ctrl-C is for the supervisor
                )
            except BaseException:
                ours.close()
                raise
        self._socket: socket.socket | None = ours
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def begin(self) -> None:
        """Wait until it has built its tokenizer; raises WorkerLost."""
        assert self._socket is not None
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._socket = None
        await self._reply()

    async def run(
        self, kind: BodyKind, body: Sequence[bytes], size: int, max_context: int
    ) -> PreparedRequest | EncodedResponse:
        """Send one body and return the result.  Raises ApiError when it is refused, WorkerLost when the worker dies."""
        assert self._writer is not None
        try:
            self._writer.write(JOB.pack(KINDS.index(kind), max_context, size))
            for part in body:
                self._writer.write(part)
                await self._writer.drain()
        except ConnectionError as error:
            raise WorkerLost(str(error)) from None
        outcome, parts = await self._reply()
        if outcome == ANSWER:
            return parts
        record = b"".join(parts)
        if outcome == PREPARED:
            reply = msgspec.msgpack.decode(record, type=PreparedReply)
            options = msgspec.structs.replace(reply.options, tools=msgspec.json.decode(reply.tools))
            return PreparedRequest(options, [await self._ids(length) for length in reply.lengths])
        if outcome == REFUSED:
            told = msgspec.msgpack.decode(record, type=Refusal)
            raise ApiError(told.status, told.message, code=told.code, param=told.param, headers=told.headers)
        raise RuntimeError(f"a preprocessing worker failed:\n{record.decode(errors='replace')}")

    async def end(self) -> int:
        """Kill and reap the process; return its exit status, which a kill does not change if it has ended already."""
        if self._socket is not None:
            self._socket.close()
        if self._writer is not None:
            self._writer.transport.abort()
        self._process.kill()
        return await asyncio.to_thread(self._process.wait)  # freeing a gigabyte takes a while

    async def _reply(self) -> tuple[int, list[bytes]]:
        outcome, length = REPLY.unpack(await self._exactly(REPLY.size))
        whole, rest = divmod(length, _PART_BYTES)
        return outcome, [await self._exactly(n) for n in [*[_PART_BYTES] * whole, rest]]

    async def _ids(self, length: int) -> TokenBuffer:
        ids = TokenBuffer.from_packed(await self._exactly(TOKEN_BYTES * length))
        if length >= _LONG_PROMPT:
            await asyncio.sleep(0)
        return ids

    async def _exactly(self, length: int) -> bytes:
        try:
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerLost(f"process {self._process.pid} ended") from None


def _closing(ports: Ports) -> ApiError:
    return unavailable("the server is shutting down", ports.settings.retry_after_s, "shutting_down")


def _too_much(what: str) -> ApiError:
    return ApiError(413, _TOO_MUCH.format(what=what), code="request_too_large")


def _memory_file(data: bytes) -> int:
    """Return the descriptor of a memfd that holds `data`."""
    descriptor = os.memfd_create("lucevisor-preprocessing", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    return descriptor


def _environment() -> dict[str, str]:
    """Return this process's environment, with this package importable and the working directory not."""
    root = str(Path(__file__).parents[3])
    known = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(known)),
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",  # one text at a time: more threads would only take memory
    }
