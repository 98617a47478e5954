"""The worker's main loop: hello, then one message at a time from the link until end of file.

The only file of the daemon that turns exceptions into Failed messages.  An error inside a step ends the process,
because a device that failed once cannot be trusted; the supervisor starts a fresh one.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import daemons
import lucevisor
from daemons import device as devices
from daemons.check import run_check
from daemons.compute_lock import ComputeLock
from daemons.errors import DaemonError
from daemons.failures import failure
from daemons.heartbeat import Reporter
from daemons.message_queue import MessageQueue, StepCancelled
from daemons.ops.selection import triton_reject_reason
from daemons.options import Options
from daemons.parking import ParkableMemory, unsupported_reason, use_memory
from daemons.runner import NO_ROWS, ModelRunner
from daemons.snapshots.transfers import TransferExecutor
from daemons.step_output import StepOutput
from daemons.weights.copies import LocatedLoad, copies_directory, locate
from daemons.weights.reading import REPORT_S
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.values import Backend
from lucevisor.protocol.arena import SharedBuffer
from lucevisor.protocol.errors import LinkClosed, ProtocolError
from lucevisor.protocol.files import ByteFile, FileClient, LocalFile
from lucevisor.protocol.frames import POSTED, Frame
from lucevisor.protocol.handshake import source_hash
from lucevisor.protocol.loading import ArenaPlan, Hello, Load, Loaded
from lucevisor.protocol.messages import (
    PROTOCOL_VERSION,
    Check,
    EncodeImage,
    ImageRows,
    Progress,
    Restore,
    Save,
    ScoreWindow,
    Shutdown,
    Unload,
    Unloaded,
    WindowScores,
)
from lucevisor.protocol.process import EXIT_CONFIGURATION, EXIT_FAILED
from lucevisor.protocol.steps import CancelPending, DraftStep, PendingCancelled, Reset, ResetDone, Step
from lucevisor.protocol.tcp import Credentials
from lucevisor.protocol.tcp_buffer import RowsEndpoint
from lucevisor.protocol.transport import BlockingLink

_POLL_S = 5e-5
"""How often the daemon looks whether the device is done while no frame comes; all the time if others wait for it, and
while drafts are made: a step behind them comes as they end, and a thread that sleeps is woken late."""


def run_worker(
    link: BlockingLink,
    files: FileClient | None,
    reporter: Reporter,
    options: Options,
    credentials: Credentials,
    lock: ComputeLock,
    model: int,
) -> int:
    """Serve the supervisor on the link of one model until it sends Shutdown or goes away; return the exit code.

    ``files``: where those of frames are, if the link passes no descriptors.
    """
    with lock:
        reporter.phase("start")
        devices.prepare(options.backend, options.threads)
        report = partial(reporter.log, "warning", "connection for rows")
        endpoint = RowsEndpoint(link, options.rows, credentials, lambda text: report(reason=text))
        link.send(hello(options, endpoint.address))
        for device in devices.accelerators(options.backend):
            triton_reject_reason(device, torch.bfloat16)  # imports Triton: half a second that the load need not take
        gc.freeze()  # what was imported is not visited whenever a model leaves
        reporter.phase("idle")
        try:
            return _MessageLoop(link, reporter, options, endpoint, lock, model, files).run()
        except LinkClosed:
            return 0  # the supervisor is gone


def hello(options: Options, rows_address: str) -> Hello:
    """Describe this process and what its torch sees."""
    found, device_problem = [], ""
    try:
        found = devices.visible_devices(options.backend)
    except DaemonError as error:  # the supervisor rejects it with advice
        device_problem = error.reason
    return Hello(
        protocol=PROTOCOL_VERSION,
        source_hash=source_hash(_directory(lucevisor.__file__), _directory(daemons.__file__)),
        pid=os.getpid(),
        python=platform.python_version(),
        executable=sys.executable,
        torch=str(torch.__version__),  # plain str, not TorchVersion
        backend=options.backend if options.backend is Backend.CPU else devices.built_backend(),
        devices=found,
        device_problem=device_problem,
        host_total_bytes=devices.host_total_bytes(),
        packages={
            name: found_version for name in ("numpy", "gguf", "msgspec", "triton") if (found_version := _version(name))
        },
        rows_address=rows_address,
    )


def _directory(file: str | None) -> Path:
    if file is None:
        raise RuntimeError(
            "the package has no file: a namespace package shadows it; clean the interpreter's site-packages"
        )
    return Path(file).parent


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class _StepFailed(Exception):
    """A step failed, and a Failed message was sent; ``code`` is the exit code of the process."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class _ParkedModel:
    """A model whose memory on the devices is free, and what it answered its Load with."""

    load: Load
    runtime: ModelRunner
    transfers: TransferExecutor
    loaded: Loaded


def _same_load(a: Load, b: Load) -> bool:
    """Return whether two loads are of the same weights and state in the same places."""
    nothing: dict[str, Any] = {"arenas": [], "replay": [], "offered": [], "warm_up": True, "shared_process": True}
    return bool(replace(a, **nothing) == replace(b, **nothing))


class _MessageLoop:
    def __init__(
        self,
        link: BlockingLink,
        reporter: Reporter,
        options: Options,
        endpoint: RowsEndpoint | None = None,
        lock: ComputeLock | None = None,
        model: int = 0,
        files: FileClient | None = None,
    ) -> None:
        self._link, self._reporter, self._options = link, reporter, options
        self._files = files
        if files is not None:
            files.on_broken = self._on_files_broken
        self._model = model  # the number of the link
        self._endpoint = endpoint or RowsEndpoint(link)
        self._endpoint.on_broken = self._on_rows_broken
        self._messages = MessageQueue(link, self._endpoint.place, lock)
        self._runtime: ModelRunner | None = None
        self._transfers: TransferExecutor | None = None
        self._loaded: tuple[Load, Loaded] | None = None
        self._memory: ParkableMemory | None = None  # of the model, if it may be parked
        self._parked: _ParkedModel | None = None
        self._reported_no_parking = False  # why it does not work is in the log
        self._arenas: tuple[list[ArenaPlan], Sequence[SharedBuffer]] | None = None  # since the first load
        self._broken = False
        self._pending_output: StepOutput | None = None  # the step that the device still computes
        self._n_rows = 0  # of that step
        self._waiting = deque[Frame]()  # DraftSteps that need its tokens
        self._upkeep: tuple[Step, int] | None = None  # a step, and its stage, that the drafter's context still lacks
        self._cancelled: list[int] = []  # dropped steps: a posted one, and all behind it
        self._operations_applied = False  # the operations of the first of them were applied
        self._idle_since = time.monotonic()

    def run(self) -> int:
        while True:
            try:
                frame = self._receive()
                if frame is None:
                    return EXIT_FAILED if self._broken else 0
                code = self._handle(frame)
            except _StepFailed as failed:
                return failed.code
            except LinkClosed:
                raise
            except ProtocolError as e:
                self._reporter.log("error", "link broken", reason=str(e))
                return EXIT_FAILED
            if code is not None:
                return code
            if self._pending_output is None:
                self._idle()

    def _idle(self) -> None:
        self._reporter.phase("idle")
        self._idle_since = time.monotonic()

    def _receive(self) -> Frame | None:
        """Return the next frame; meanwhile answer the step on the device as soon as that is done."""
        while self._pending_output is not None and not self._messages.wait(self._poll_s):
            self._answer_if_done()
        return self._messages.receive()

    @property
    def _poll_s(self) -> float:
        output, runtime = self._pending_output, self._runtime
        drafting = output is not None and output.is_drafting and runtime is not None and not runtime.shares_cores
        return 0.0 if drafting or (runtime is not None and runtime.is_polling) else _POLL_S

    def _answer_if_done(self, *, idle: bool = True) -> bool:
        """Answer the step on the device if that is done; return whether one is left.

        ``idle``: report the idle phase afterwards.  Raises _StepFailed after sending Failed.
        """
        output = self._pending_output
        if output is None:
            return False
        try:
            done = output.async_output is None or output.async_output.ready
        except Exception as e:  # process boundary: report, then exit
            raise self._failed(output, e) from e
        if done:
            self._send_pending_output()
        if done and idle:
            self._idle()
        return not done

    def _send_pending_output(self) -> None:
        """Wait for the step on the device, if there is one, and answer it.  Raises _StepFailed after sending Failed."""
        output = self._pending_output
        if output is None or self._runtime is None:
            return
        waiting, self._pending_output, self._waiting = self._waiting, None, deque()
        try:
            output = self._runtime.finish_step(output)
        except Exception as e:  # process boundary: report, then exit
            raise self._failed(output, e) from e
        self._answer(output, self._n_rows)
        code = self._run_upkeep()
        for frame in waiting:
            self._send_pending_output()  # drafts
            if code is None and isinstance(frame.message, DraftStep):
                code = self._step(frame.message, frame.flags, 0.0)
        if code is not None:
            raise _StepFailed(code)

    def _failed(self, output: StepOutput, error: Exception) -> _StepFailed:
        """Send Failed for the step on the device."""
        return _StepFailed(self._fail(f"step {output.result.step_id}", error, f"stage {output.result.stage}"))

    def _answer(self, output: StepOutput, n_rows: int) -> None:
        payload = [t.contiguous().numpy().data for t in output.payload]
        result, runtime = output.result, self._runtime
        self._link.send(result, request_id=result.step_id, payload=payload)
        if runtime is not None:
            runtime.publish_tokens(output)
        self._reporter.step_done(n_rows)

    def _handle(self, frame: Frame) -> int | None:
        """Return None to go on, or the exit code."""
        if (
            isinstance(frame.message, DraftStep) and self._pending_output is not None
        ):  # it needs the tokens of that step
            self._waiting.append(frame)
            return None
        if not isinstance(frame.message, Step):  # a step may be queued behind the one on the device
            self._send_pending_output()
        match frame.message:
            case Step() | DraftStep() as message:
                wait_s = time.monotonic() - self._idle_since if self._pending_output is None else 0.0
                return self._step(message, frame.flags, wait_s, frame.payload)
            case ScoreWindow() as score:
                return self._score(score)
            case EncodeImage() as image:
                return self._encode(image, frame.payload)
            case Load() as load:
                return self._load(load, frame)
            case Unload(park):
                return self._unload(park=park)
            case Save() | Restore() as order if self._transfers is not None and self._runtime is not None:
                self._runtime.flush()
                self._transfers.submit(order, *self._files_of(frame))
                return None
            case Reset(token) if self._runtime is not None:
                self._end_transfers("the supervisor dropped every sequence")
                self._runtime.reset()
                self._messages.clear()
                self._cancelled, self._operations_applied = [], False
                self._link.send(ResetDone(token))
                return None
            case CancelPending(stage):
                self._link.send(PendingCancelled(stage, self._cancelled, self._operations_applied))
                self._cancelled, self._operations_applied = [], False
                return None
            case Check() as order:
                self._reporter.phase("check")
                self._link.send(run_check(order, self._options.backend, frame.fds))
                return None
            case Shutdown():
                self._end_transfers("the daemon is shutting down")
                return 0
            case other:
                return self._fail(type(other).__name__, ValueError("unexpected message in this state"), "")

    def _step(
        self, message: Step | DraftStep, flags: int, wait_s: float, embeddings: memoryview = NO_ROWS
    ) -> int | None:
        step = message.step if isinstance(message, DraftStep) else message
        stage, posted = flags & ~POSTED, bool(flags & POSTED)
        if isinstance(message, Step) and (self._cancelled or (posted and self._messages.is_cancelling)):
            # Also what is not posted: behind one that is dropped it is out of order.
            self._cancelled.append(step.step_id)
            return None
        if isinstance(message, DraftStep) and step.step_id in self._cancelled:
            return None  # it comes again with its step
        self._reporter.phase("step", step.step_id)
        if isinstance(message, Step) and message.upkeep and self._waiting:
            self._send_pending_output()  # its operations are the draft stage's, too, which has not had those before
        code = self._run_upkeep()  # before the step's operations, and while the one before is computed
        if code is not None:
            return code
        try:
            if self._runtime is None:
                raise ValueError("step before load")
            if isinstance(message, DraftStep):
                outcome = self._runtime.run_draft(message, wait_s)
            else:
                poll_previous = partial(self._answer_if_done, idle=False)
                outcome = self._runtime.run_step(
                    message,
                    stage,
                    wait_s,
                    self._messages.wait_for_masks,
                    self._send_pending_output,
                    self._await_rows,
                    posted,
                    poll_previous,
                    embeddings,
                )
        except (LinkClosed, _StepFailed):
            raise
        except StepCancelled:
            if isinstance(message, DraftStep):
                return None  # every sequence is dropped
            self._cancelled.append(step.step_id)
            self._operations_applied = True
            return None
        except Exception as e:  # process boundary: report, then exit
            where = "the draft stage" if isinstance(message, DraftStep) else f"stage {stage}"
            return self._fail(f"step {step.step_id}", e, where)
        if isinstance(message, Step):
            self._upkeep = message, stage
        if outcome.async_output is not None:
            self._pending_output, self._n_rows = outcome, step.n_tokens
            return None
        if isinstance(message, Step) and self._runtime.awaits_drafts(step) and self._messages.draft_step(step.step_id):
            return self._answer_behind_drafts(outcome, step.n_tokens)
        self._answer(outcome, step.n_tokens)
        return self._run_upkeep()

    def _answer_behind_drafts(self, output: StepOutput, n_rows: int) -> int | None:
        """Launch the drafts that follow a step on the device, then answer the step."""
        frame = self._messages.receive()
        assert frame is not None
        assert isinstance(frame.message, DraftStep)
        assert self._runtime is not None
        try:
            drafts = self._runtime.run_draft(frame.message, 0.0)
        except StepCancelled:  # every sequence is dropped
            self._answer(output, n_rows)
            return None
        except Exception as e:  # process boundary: report, then exit
            self._answer(output, n_rows)
            return self._fail(f"step {output.result.step_id}", e, "the draft stage")
        self._answer(output, n_rows)
        if drafts.async_output is not None:
            self._pending_output, self._n_rows = drafts, n_rows
            return None
        self._answer(drafts, n_rows)
        return None

    def _run_upkeep(self) -> int | None:
        """Extend the drafter's context by the last step, if that is pending.  Returns None, or the exit code."""
        pending, self._upkeep = self._upkeep, None
        if pending is None or self._runtime is None:
            return None
        try:
            self._runtime.run_upkeep(*pending)
        except Exception as e:  # process boundary: report, then exit
            return self._fail(f"step {pending[0].step_id}", e, "the draft stage")
        return None

    def _await_rows(self, rows: SharedBuffer, region: int, step_id: int, posted: bool) -> float:
        if self._pending_output is None:
            self._reporter.phase("idle")
        seconds = self._messages.await_rows(rows, region, step_id, posted, self._answer_if_done)
        self._reporter.phase("step", step_id)
        return seconds

    def _score(self, message: ScoreWindow) -> int | None:
        started = time.monotonic()
        self._reporter.phase("score")
        try:
            if self._runtime is None or self._runtime.scorer is None:
                raise ValueError("this daemon has no scoring model")
            scores = self._runtime.scorer.score(message)
        except Exception as e:  # process boundary: report, then exit
            return self._fail(f"window {message.window}", e, "the scoring stage")
        answer = WindowScores(message.window, 0 if scores is None else len(scores), time.monotonic() - started)
        self._link.send(answer, payload=[] if scores is None else [scores.contiguous().numpy().data])
        return None

    def _encode(self, message: EncodeImage, pixels: memoryview) -> int | None:
        started = time.monotonic()
        self._reporter.phase("encode")
        try:
            if self._runtime is None or self._runtime.vision is None:
                raise ValueError("this daemon has no vision encoder")
            rows = self._runtime.vision.encode(message, pixels)
        except Exception as e:  # process boundary: report, then exit
            return self._fail(f"image {message.image}", e, "the vision stage")
        answer = ImageRows(message.image, len(rows), time.monotonic() - started)
        self._link.send(answer, payload=[rows.contiguous().view(torch.uint8).numpy().data])
        return None

    def _files_of(self, frame: Frame) -> list[ByteFile]:
        """Return the files that came with a frame, which the caller closes."""
        if self._files is not None:
            return [self._files.file(number) for number in frame.files]
        return [LocalFile(fd) for fd in frame.fds]

    def _load(self, load: Load, frame: Frame) -> int | None:
        self._reporter.phase("load")
        self._reporter.model = self._model
        refused, loaded, asked = None, None, load
        try:
            if self._parked is not None and not load.arenas and _same_load(self._parked.load, load):
                self._unpark(self._parked)
                return None
            self._drop_parked()
            n_files = bool(load.replay) + len(load.offered)
            n_arenas = len(frame.fds) - n_files if self._files is None else 0
            sources = self._files_of(replace(frame, fds=frame.fds[n_arenas:]))
            rows = sources.pop(0) if load.replay else None
            # First, as a neighbour waits for it that may have what this daemon waits for: the copy of the model.
            if load.arenas or self._arenas is None:
                self._arenas = load.arenas, self._endpoint.open(load.arenas, frame.fds[:n_arenas])
            arenas, buffers = self._arenas
            load = replace(load, arenas=arenas)
            located = self._locate(load, sources)
            try:
                self._memory = self._parkable_memory(load)
                with use_memory(self._memory):
                    self._runtime, loaded = ModelRunner.load(
                        located.load, self._options.backend, buffers, self._reporter, rows
                    )
            finally:
                located.close()
            loaded = replace(loaded, identities=located.as_asked(loaded.identities))
            self._transfers = TransferExecutor(
                self._runtime.state_map(),
                lambda answer, request_id: self._link.send(answer, request_id=request_id),
                group=self._options.group,
                on_broken=self._break,
            )
        except Exception as e:  # process boundary: report, then exit
            places = [f"device {s.device} layers {s.layers}" for p in load.stages for s in p.shards]
            places += [] if load.draft is None else [f"device {load.draft.device} draft stage"]
            places += [] if load.score is None else [f"device {load.score.device} scoring stage"]
            places += [] if load.vision is None else [f"device {load.vision.device} vision stage"]
            if not (load.shared_process and isinstance(e, DaemonError | GgufError | OSError | MemoryError)):
                return self._fail("load", e, ", ".join(places))
            refused = failure("load", e, f"group {self._options.group}", ", ".join(places))
        if refused is not None:  # here the exception is gone, and with it the frames that held what was loaded
            self._drop_parked()
            self._drop_model()
            self._link.send(Unloaded(problem=f"{refused.where}: {refused.reason}; {refused.advice}"))
            return None
        assert self._runtime is not None
        assert loaded is not None
        self._loaded = asked, loaded
        self._messages.spin_s = load.spin_s
        self._runtime.draft_step = self._messages.draft_step
        self._runtime.await_captures = self._messages.await_captures
        self._reporter.memory(self._runtime.free_bytes())
        self._link.send(loaded)
        return None

    def _parkable_memory(self, load: Load) -> ParkableMemory | None:
        """Return memory that can be parked, for a model that may be; None where that is not supported."""
        if not load.parkable or self._options.backend is Backend.CPU:
            return None
        for device in devices.accelerators(self._options.backend):
            if why := unsupported_reason(device):
                if not self._reported_no_parking:
                    self._reporter.log("warning", "models are unloaded, not parked", device=str(device), reason=why)
                self._reported_no_parking = True
                return None
        return ParkableMemory()

    def _unload(self, *, park: bool) -> int | None:
        started, parked_bytes = time.monotonic(), 0
        self._reporter.phase("load")
        try:
            self._end_transfers("the model is unloaded")
            if park and self._memory is not None and self._runtime is not None:
                parked_bytes = self._park(self._memory, self._runtime)
            if not parked_bytes:
                self._drop_parked()
                self._drop_model()
        except Exception as e:  # process boundary: report, then exit
            return self._fail("unload", e, "")
        self._link.send(Unloaded(parked_bytes, time.monotonic() - started))
        return None

    def _park(self, memory: ParkableMemory, runtime: ModelRunner) -> int:
        """Free the model's memory on the devices; return the bytes in host memory, 0 if there is too little of it."""
        runtime.reset()
        indices, parked_bytes = [*runtime.free_bytes()], memory.park()
        if parked_bytes and self._loaded is not None and self._transfers is not None:
            self._parked = _ParkedModel(self._loaded[0], runtime, self._transfers, self._loaded[1])
            self._runtime, self._transfers, self._upkeep = None, None, None
            self._forget_steps(indices)
        return parked_bytes

    def _unpark(self, parked: _ParkedModel) -> None:
        assert self._memory is not None
        started = time.monotonic()
        self._memory.unpark()
        self._parked, self._runtime, self._transfers = None, parked.runtime, parked.transfers
        self._messages.spin_s = parked.load.spin_s
        self._reporter.memory(parked.runtime.free_bytes())
        self._link.send(replace(parked.loaded, seconds=time.monotonic() - started, replayed=False))

    def _drop_parked(self) -> None:
        if self._parked is not None:
            self._parked.transfers.close()
            self._parked, self._memory = None, None

    def _drop_model(self) -> None:
        """Free all that was loaded but the boundary memory."""
        if self._transfers is not None:
            self._transfers.close()
        indices = [] if self._runtime is None else [*self._runtime.free_bytes()]
        self._runtime, self._transfers, self._upkeep = None, None, None
        self._memory, self._loaded = None, None
        self._forget_steps(indices)

    def _forget_steps(self, indices: Sequence[int]) -> None:
        """Drop what belongs to the steps of a model that left, and the memory of devices that nothing uses."""
        self._messages.clear()
        self._messages.spin_s = 0.0
        self._cancelled, self._operations_applied = [], False
        for device in devices.accelerators(self._options.backend) or [devices.CPU]:
            devices.release_memory(device)
        backend = self._options.backend
        self._reporter.memory({i: devices.memory_free(devices.torch_device(backend, i)) for i in indices})

    def _locate(self, load: Load, sources: Sequence[ByteFile]) -> LocatedLoad:
        """Find the model's files on this host, or get what is needed of them."""
        device = next((shard.device for plan in load.stages for shard in plan.shards), 0)
        stage, reported_at = load.stages[0].stage if load.stages else -1, 0.0

        def report(done: int, total: int) -> None:
            nonlocal reported_at
            if (now := time.monotonic()) - reported_at >= REPORT_S or done >= total:
                reported_at = now
                self._reporter.progress(Progress(stage, device, done, total, "receive"))

        def log(event: str, reason: str) -> None:
            self._reporter.log("warning", event, reason=reason)

        cache = copies_directory(self._options.cache_dir) if load.offered else Path()
        return locate(load, sources, self._options.backend, cache, report, log)

    def _end_transfers(self, reason: str) -> None:
        if self._transfers is not None:
            self._transfers.cancel(reason)

    def _on_rows_broken(self, error: ProtocolError) -> None:
        self._reporter.log("error", "connection for rows broken", reason=str(error))
        self._break()

    def _on_files_broken(self, problem: str) -> None:
        if self._link.closed_because is None:
            self._reporter.log("error", "connection for files broken", reason=problem)
        self._break()

    def _break(self) -> None:
        """Wake the compute thread to end the process, because a transfer thread or its device failed."""
        self._broken = True
        self._link.close()

    def _fail(self, what: str, error: Exception, where: str) -> int:
        message = failure(what, error, f"group {self._options.group}", where)
        self._link.send(message)
        return EXIT_CONFIGURATION if message.configuration else EXIT_FAILED
