"""Preprocesses long bodies in worker processes, so that no client can block the event loop by holding the GIL.

A request that exceeds a worker's limits on memory and CPU time is refused; one whose worker dies of something else is
tried once more. (A `ProcessPoolExecutor` would wait for ever for a result whose worker was killed while it sent it.)"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import psutil
import structlog

from lucevisor.api.contexts import ApiSettings, BodyParser, ModelContext, ParsedBody, ServedModels, ServerContext
from lucevisor.api.errors import ApiError, unavailable
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.schemas import decode_object
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.protocol.process import end_with_parent
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer

SHORT_BYTES: Final = 256 * 1024
"""Bodies up to this size have a worker to themselves, so that they do not wait for longer ones."""

_OUT_OF_MEMORY: Final = 75  # exit code

log = structlog.get_logger("lucevisor.api")


_Setup = tuple[ApiSettings, list[tuple[dict[str, Any], dict[str, Any]]]]
"""What a worker is set up with: of each model the metadata for its tokenizer, and other fields of its context."""


class WorkerLost(Exception):
    """The worker died with a body, but not of its limits."""


class Preprocessor:
    """The workers of one server.  Each starts with its first body, or by `start`."""

    def __init__(self, *metadata: Mapping[str, object]) -> None:
        """Copy the metadata of each model's GGUF header, because the file may change before a worker starts."""
        prefixes = ("tokenizer.", "general.")
        self._metadata = [{key: value for key, value in one.items() if key.startswith(prefixes)} for one in metadata]
        self._short, self._long = _Worker(), _Worker()
        self._jobs: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, models: ServedModels) -> None:
        """Start a worker in the background, so that the first body does not wait for it."""
        self._begin(self._warm_up(models))

    async def parse(self, parser: BodyParser, body: Sequence[bytes], models: ServedModels) -> ParsedBody:
        """Return the request prepared from a body, or the response to it, and the model that it names; raises
        ApiError."""
        worker = self._short if sum(map(len, body)) <= SHORT_BYTES else self._long
        if worker.n_waiting >= models.server.settings.max_waiting_bodies:
            raise ApiError(
                429,
                f"{worker.n_waiting} long requests are waiting to be processed; try again in a second",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        worker.n_waiting += 1
        try:
            await worker.lock.acquire()
        finally:
            worker.n_waiting -= 1
        # If the client disconnects, let the worker finish: restarting it costs more.
        return await asyncio.shield(self._begin(self._parse_with_retry(worker, parser, body, models)))

    async def close(self) -> None:
        self._closed = True
        for worker in (self._short, self._long):
            await worker.stop()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _begin(self, work: Any) -> asyncio.Task[Any]:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may have disconnected
        return job

    async def _warm_up(self, models: ServedModels) -> None:
        async with self._short.lock:
            try:
                if not self._closed:
                    await self._short.start(self._setup(models))
            except (WorkerLost, OSError) as error:
                if not self._closed:  # else `close` stopped it
                    log.error("preprocessing worker failed to start", reason=str(error))

    async def _parse_with_retry(
        self, worker: _Worker, parser: BodyParser, body: Sequence[bytes], models: ServedModels
    ) -> ParsedBody:
        """Parse a body, a second time if the worker is lost.  Releases the worker's lock."""
        settings, how = models.server.settings, ""
        try:
            for _ in range(2):
                self._check_open(settings)
                try:
                    await worker.start(self._setup(models))
                    return await worker.run(parser, body, [ctx.max_prompt for ctx in models], settings)
                except WorkerLost as lost:
                    if self._closed:
                        continue
                    how = str(lost)
                    log.warning("preprocessing worker died", reason=how, body_bytes=sum(map(len, body)))
            self._check_open(settings)
            message = f"two processes in a row that prepared this request {how}; try again later"
            raise unavailable(message, settings.retry_after_s)
        except OSError as error:  # no memory or descriptors for another worker
            await worker.stop()
            log.error("preprocessing worker failed to start", reason=str(error))
            message = f"long requests cannot be processed now: {error.strerror}; try again later"
            raise unavailable(message, settings.retry_after_s) from None
        finally:
            worker.lock.release()

    def _check_open(self, settings: ApiSettings) -> None:
        if self._closed:
            raise unavailable("the server is shutting down", settings.retry_after_s, "shutting_down")

    def _setup(self, models: ServedModels) -> _Setup:
        names = (
            *("model", "defaults", "direct_defaults", "efforts", "normalise"),
            *("banned", "images", "pooling", "pooled_width"),
        )
        fields = [{name: getattr(ctx, name) for name in names} for ctx in models]
        return models.server.settings, list(zip(self._metadata, fields, strict=True))


class _Worker:
    """One worker process, started when it is needed.  Hold `lock` to use it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.n_waiting = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    async def start(self, setup: _Setup) -> None:
        """Start the process, unless it runs, and wait until it has its tokenizer; raises WorkerLost or OSError."""
        if self._process is not None:
            return
        spawn = multiprocessing.get_context("spawn")
        self._connection, worker_end = spawn.Pipe()
        with worker_end:  # a copy left open here would hide the worker's death
            process = spawn.Process(target=_main, args=(worker_end, os.getpid()), daemon=True)
            process.start()  # in the main thread: the worker gets PDEATHSIG when the thread that started it ends
        self._process = process
        if (exit_code := await self._ask(setup)) is not None:
            raise WorkerLost(_ending(exit_code))

    async def run(
        self, parser: BodyParser, body: Sequence[bytes], max_contexts: Sequence[int], settings: ApiSettings
    ) -> ParsedBody:
        result = await self._ask((parser, list(body), max_contexts, settings.preprocess_timeout_s))
        if isinstance(result, Exception):
            raise result
        if isinstance(result, tuple):
            return result
        if result == -signal.SIGPROF:
            limit = f"{settings.preprocess_timeout_s:g} s"
        elif result in (_OUT_OF_MEMORY, -signal.SIGABRT):  # native code aborts when an allocation fails
            limit = f"{settings.preprocess_memory_bytes >> 20} MiB of memory"
        else:
            raise WorkerLost(_ending(result))
        log.warning("preprocessing worker killed", reason=f"the body takes more than {limit}")
        raise ApiError(413, f"the body takes more than {limit} to process; send less", code="request_too_large")

    async def _ask(self, message: object) -> Any:
        """Send a message; return the answer, or the exit code of a worker that died."""
        assert self._connection is not None
        try:
            return await asyncio.to_thread(_exchange, self._connection, message)
        except (EOFError, OSError):  # at any byte of the message or of the answer
            return await self.stop()

    async def stop(self) -> int:
        """Kill the process, if there is one; return its exit code."""
        process, self._process = self._process, None
        self._connection = None  # closed with its last reference: a thread may still read from it
        if process is None:
            return 0
        process.kill()
        await asyncio.to_thread(process.join)  # freeing a gigabyte takes a while
        exit_code = process.exitcode or 0
        process.close()
        return exit_code


def _exchange(connection: Connection, message: object) -> Any:
    connection.send(message)
    return connection.recv()


def _ending(exit_code: int) -> str:
    return f"ended with {signal.Signals(-exit_code).name if exit_code < 0 else f'exit code {exit_code}'}"


# ---- in the worker


_models: ServedModels  # of this process


def _main(connection: Connection, server_pid: int) -> None:
    """Answer messages: the setup, then requests."""
    _detach(server_pid)
    _set_up(*connection.recv())
    connection.send(None)  # ready
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer = _parse_in_worker(*request)
        except Exception as error:
            answer = ForkingPickler.dumps(error)
        connection.send_bytes(answer)


def _detach(server_pid: int) -> None:
    """Detach from the server's terminal and output, but end with it."""
    if not end_with_parent(server_pid):
        os._exit(0)
    os.setsid()  # Ctrl-C is for the supervisor
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time; more threads would only need memory


def _set_up(settings: ApiSettings, models: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    global _models
    contexts, server = [], ServerContext(settings=settings)
    for metadata, fields in models:
        tokenizer, template = Tokenizer.from_gguf(metadata), ChatTemplate.from_gguf(metadata)
        tokenizer.max_token_bytes  # noqa: B018 - computed now, not while a request waits
        contexts.append(ModelContext(tokenizer=tokenizer, template=template, server=server, **fields))
        contexts[-1].grammars.prepare()
    _models = ServedModels(contexts)
    gc.collect()
    gc.freeze()
    gc.disable()  # collecting among the million objects of one body frees nothing
    limit = psutil.Process().memory_info().data + settings.preprocess_memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _parse_in_worker(parser: BodyParser, body: list[bytes], max_contexts: Sequence[int], cpu_s: float) -> memoryview:
    """Prepare a request, and pickle it.  Ends the process with SIGPROF after `cpu_s` of CPU time."""
    for ctx, max_context in zip(_models, max_contexts, strict=True):
        ctx.max_context = max_context
    is_long = sum(map(len, body)) > SHORT_BYTES
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # unlike a handler's exception, a signal ends native code as well
    try:
        fields = decode_object(b"".join(body))
        ctx = _models.of_body(fields)
        result = parser(fields, ctx)
        if isinstance(result, PreparedRequest):
            result = replace(result, prompts=[TokenBuffer.of(prompt) for prompt in result.prompts])
        return ForkingPickler.dumps((result, ctx.model.name))
    except ApiError:
        raise
    except RecursionError:  # pickle recurses as deep as a schema that the request keeps is nested
        raise ApiError(400, "the body is nested too deep", code="invalid_json") from None
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)  # too little may be left to report it
    except BaseException:  # also a panic of native code, which is no Exception and cannot be pickled
        raise RuntimeError(f"a preprocessing worker failed:\n{traceback.format_exc()}") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if is_long:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
