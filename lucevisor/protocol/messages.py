"""All messages of the protocol, and one table with the kind, the sender and the limits of each (docs/protocol.md).

A frame's kind selects the record, so metadata carries no type tag."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Literal, NamedTuple

import msgspec

from lucevisor.model.values import Dtype, LayerRange
from lucevisor.protocol.loading import ArenaPlan, Hello, Load, Loaded
from lucevisor.protocol.steps import (
    Attach,
    Attached,
    CancelPending,
    DraftStep,
    Masks,
    PendingCancelled,
    PlacedRows,
    Reset,
    ResetDone,
    Rows,
    RowsCopy,
    Step,
    StepResult,
)

PROTOCOL_VERSION = 1

KIB = 1024
MIB = 1024 * KIB
MAX_METADATA_BYTES = 4 * MIB
MAX_PAYLOAD_BYTES = 256 * MIB


class Role(StrEnum):
    """The two ends."""

    SUPERVISOR = "supervisor"
    DAEMON = "daemon"


class StreamKind(StrEnum):
    """The two sockets of a daemon, those for rows between daemons that share no memory, and one for its files."""

    LINK = "link"
    HEARTBEAT = "heartbeat"
    ROWS = "rows"
    FILES = "files"


class MessageKind(IntEnum):
    """Frame kinds.  Numbers are never reused."""

    HELLO = 1
    LOAD = 2
    LOADED = 3
    STEP = 4
    STEP_RESULT = 5
    FAILED = 6
    RESET = 7
    CHECK = 8
    CHECKED = 9
    SHUTDOWN = 10
    SAVE = 11
    SAVED = 12
    RESTORE = 13
    RESTORED = 14
    RESET_DONE = 15
    TRANSFER_FAILED = 16
    DRAFT_STEP = 17
    MASKS = 18
    SCORE_WINDOW = 19
    WINDOW_SCORES = 20
    CANCEL_PENDING = 21
    PENDING_CANCELLED = 22
    ROWS_COPY = 23
    PLACED_ROWS = 24
    UNLOAD = 25
    UNLOADED = 26
    ENCODE_IMAGE = 27
    IMAGE_ROWS = 28
    HEARTBEAT = 32
    PROGRESS = 33
    LOG_LINE = 34
    ATTACH = 48
    ATTACHED = 49
    ROWS = 50
    FILE_REQUEST = 64
    FILE_ANSWER = 65


class Failed(msgspec.Struct, frozen=True):
    """A daemon could not carry out a message.  It exits after sending this."""

    what: str  # "load", "step 17", "check"
    where: str  # "hip:1 layers [20,40)", a file, a tensor
    reason: str
    advice: str
    configuration: bool = False  # a restart would fail the same way: do not retry
    details: str = ""  # traceback


class Shutdown(msgspec.Struct, frozen=True):
    """Shut down in order.  End of file on the link means the same."""

    reason: str = ""


class Unload(msgspec.Struct, frozen=True):
    """Free the memory of the model's weights, state and graphs. ``park``: keep the weights in host memory, if half of
    what is free there holds them, for a Load of the same."""

    park: bool = False


class Unloaded(msgspec.Struct, frozen=True):
    """Answer to Unload, and to a Load with ``shared_process`` that failed (``problem``); the daemon keeps running."""

    parked_bytes: int = 0  # of weights in host memory
    seconds: float = 0.0
    problem: str = ""


class Heartbeat(msgspec.Struct, frozen=True):
    """Liveness of the process, and how long its compute thread has been busy with one thing."""

    count: int
    phase: Literal["start", "load", "idle", "step", "score", "encode", "check"]
    busy_s: float  # in this phase; while loading, since the last progress
    step_id: int
    n_steps: int
    n_tokens: int
    rss_bytes: int
    free_bytes: list[int]  # per device


class Progress(msgspec.Struct, frozen=True):
    """Load progress of one shard.  ``model``: the number of the link that its Load came over."""

    stage: int
    device: int
    done_bytes: int
    total_bytes: int
    phase: str  # "kernels", "pools", "read", "convert", "warm up"
    model: int = 0


class LogLine(msgspec.Struct, frozen=True):
    """A structured log record of the daemon."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, str | int | float | bool | None] = {}


# ---- checks of devices, and times of layers for a placement


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Layers to time on a device, with the embedding and the output matrix where set."""

    device: int
    layers: LayerRange
    embedding: bool = False
    output: bool = False


class Measure(msgspec.Struct, frozen=True):
    """Time each of ``spans`` for a slice of ``n_rows`` tokens from position 0, and for one token after it."""

    spans: list[Span]
    kv_dtype: Dtype
    n_rows: int
    threads: int = 0
    options: dict[str, str] = {}


class Tune(msgspec.Struct, frozen=True):
    """Measure on each of ``devices`` up to how many rows each kernel is the fastest for the model's matrices, and keep
    that for later loads."""

    devices: list[int]
    threads: int = 0
    options: dict[str, str] = {}


class Check(msgspec.Struct, frozen=True):
    """Compare one layer on every visible device with the float32 cpu reference, and map ``arenas``. With ``measure`` or
    ``tune``, time layers or kernels instead. Without files, do nothing: the payload of the frame times the
    way there."""

    files: list[str]
    layer: int
    dtype: Dtype
    arenas: list[ArenaPlan] = []
    measure: Measure | None = None
    tune: Tune | None = None


TIMED_BYTES = 4 * MIB
TIMING = Check([], 0, Dtype.FLOAT32)
"""Goes with a payload of TIMED_BYTES over a connection whose rate is to be measured."""


class CheckLine(msgspec.Struct, frozen=True):
    subject: str  # "cuda:0 layer 3", "arena"
    ok: bool
    detail: str


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Seconds for the layers of a Span, for one token and for ``Measure.n_rows``.  ``end_``: its embedding and output,
    the output for one row in both."""

    decode_s: float
    prefill_s: float
    end_decode_s: float = 0.0
    end_prefill_s: float = 0.0


class Checked(msgspec.Struct, frozen=True):
    """Answer to Check.  ``timings``: one per Span, in order; empty when one failed, which ``lines`` then reports.
    ``lines``: also one for each limit that was tuned.  ``warnings``: what costs speed and can be fixed."""

    lines: list[CheckLine]
    timings: list[Timing] = []
    warnings: list[str] = []


# ---- scoring by the small model of PFlash


class ScoreWindow(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of a window for the scoring model: ``tokens[i]`` is at position ``start + i``; 0 begins a
    window.

    ``n_query`` is 0 except with the last tokens of a window: the attention of the last ``n_query`` of them, all in this
    message, is then the score of every token of the window."""

    window: int  # number of the window, for the answer
    start: int
    tokens: list[int]
    n_query: int = 0


class WindowScores(msgspec.Struct, frozen=True, array_like=True):
    """Answer to ScoreWindow.  Payload: with a window's last tokens, float32 scores of all its ``n_scores`` tokens."""

    window: int
    n_scores: int
    compute_s: float = 0.0


# ---- images


class EncodeImage(msgspec.Struct, frozen=True, array_like=True):
    """An image for the vision encoder.  Payload: its pixels, one byte for each of red, green and blue, by rows."""

    image: int  # number of the image, for the answer
    width: int
    height: int


class ImageRows(msgspec.Struct, frozen=True, array_like=True):
    """Answer to EncodeImage.  Payload: ``n_rows`` embedding rows of float32."""

    image: int
    n_rows: int
    compute_s: float = 0.0


# ---- snapshot transfers


class TransferTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in the file of a transfer (docs/snapshot-format.md). ``kind`` identifies it within its ``layer``: the
    name of a state tensor, with suffix ``.scale`` for the scales of q8_0. Axis 0 of a paged tensor is positions,
    starting at ``first``. ``draft``: of the drafter, whose layers are numbered by themselves."""

    name: str
    layer: int  # absolute
    kind: str
    dtype: str  # in safetensors notation: F32, BF16, F16, I8
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    n_bytes: int
    first: int = 0
    draft: bool = False


class SlotPlace(msgspec.Struct, frozen=True, array_like=True):
    """Pages and state of a prefix slot of ``n_tokens``. ``full[i]`` holds positions [64 i, 64 i + 64), ``window[i]``
    those of entry ``first_window + i``; ``state``: -1 if none."""

    n_tokens: int
    full: list[int] = []
    window: list[int] = []
    first_window: int = 0
    state: int = -1


class Save(msgspec.Struct, frozen=True):
    """Write ``tensors`` to a snapshot file, whose descriptor travels with the frame; ``file`` is for error messages.
    The supervisor keeps every page and state of ``place`` unchanged until the answer, Saved or TransferFailed."""

    transfer: int
    file: str
    place: SlotPlace
    tensors: list[TransferTensor]


class Saved(msgspec.Struct, frozen=True):
    transfer: int
    n_bytes: int
    seconds: float


class Restore(msgspec.Struct, frozen=True):
    """Read ``tensors`` from a snapshot file into ``place``, which no sequence uses yet and the transfer owns until it
    is answered by Restored or TransferFailed. ``place.n_tokens`` may be less than the file holds."""

    transfer: int
    file: str
    place: SlotPlace
    tensors: list[TransferTensor]


class Restored(msgspec.Struct, frozen=True):
    transfer: int
    n_bytes: int
    seconds: float
    converted: str = ""  # "BF16 to float32" when file and pools hold different number formats


class TransferFailed(msgspec.Struct, frozen=True):
    """Answer to a Save or Restore that failed; the daemon keeps running.  A device failure is a Failed instead."""

    transfer: int
    where: str  # file and tensor
    reason: str
    advice: str
    details: str = ""  # traceback


# ---- files of the supervisor, over TCP


class FileOperation(IntEnum):
    """What a daemon asks of a file.  Numbers are never reused."""

    READ = 1
    WRITE = 2
    CHECKSUM = 3
    STATUS = 4
    CLOSE = 5


class FileRequest(msgspec.Struct, frozen=True, array_like=True):
    """One operation on ``n_bytes`` from ``offset`` on of a file. ``number``: of the request on its connection,
    ``file``: of the descriptor among those that came with frames, both from 0 on. A WRITE has the bytes as payload, and
    their CRC-32 in ``checksum``."""

    number: int
    operation: FileOperation
    file: int
    offset: int = 0
    n_bytes: int = 0
    checksum: int = 0


class FileAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to the FileRequest of this ``number``, in order; a READ has the bytes as payload. ``checksum``: CRC-32 of
    those, or of what CHECKSUM named. ``n_bytes``, ``complete``: of the whole file, for STATUS. ``problem``: why nothing
    was done, with ``errno`` if the system said so."""

    number: int
    checksum: int = 0
    n_bytes: int = 0
    complete: bool = False
    problem: str = ""
    errno: int = 0


# ---- the table


Command = (
    Load
    | Step
    | DraftStep
    | Masks
    | PlacedRows
    | ScoreWindow
    | EncodeImage
    | CancelPending
    | Reset
    | Unload
    | Check
    | Save
    | Restore
    | Shutdown
    | FileAnswer
)
Answer = (
    Hello | Loaded | StepResult | WindowScores | ImageRows | PendingCancelled | ResetDone | Checked | Saved | Restored
)
Message = (
    Command
    | Answer
    | Unloaded
    | TransferFailed
    | Failed
    | RowsCopy
    | Attach
    | Attached
    | Rows
    | FileRequest
    | Heartbeat
    | Progress
    | LogLine
)


class MessageType(NamedTuple):
    """A kind of message.  ``reason``: of the limits, which are in bytes."""

    record: type[Message]
    sender: Role
    max_metadata_bytes: int
    max_payload_bytes: int
    reason: str
    stream: StreamKind = StreamKind.LINK


_STEP_LIMITS = (
    "an id takes at most 5 bytes: the history of a 262,144-token context is 1.3 MiB, a full chunk and the page "
    "tables of 64 such contexts another 1.5 MiB"
)
_RESULT_LIMITS = (
    "at most 15 bytes per log-probability pair; payload: float32 logits of 256 rows of a 262,144-word vocabulary"
)
_LOAD_LIMITS = "paths of a split file, at most 4 KiB each; 5 bytes for each of 131,072 tokens to replay"
_SAVE_LIMITS = "at most 200 bytes per tensor, 1,024 layers of 4; 5 bytes per page, 16,384 for 1 Mi tokens"
_FILE_LIMITS = "six numbers and a problem; payload: one chunk"
_IMAGE_LIMITS = "three numbers; payload: pixels, or 16,384 rows of 4,096 float32"
_ROWS_LIMITS = "six numbers; payload: 8,192 rows of 8,192 float32"

_UP, _DOWN = Role.DAEMON, Role.SUPERVISOR
MESSAGES: dict[MessageKind, MessageType] = {
    MessageKind.HELLO: MessageType(Hello, _UP, 64 * KIB, 0, "a few hundred bytes per device"),
    MessageKind.LOAD: MessageType(Load, _DOWN, MAX_METADATA_BYTES, 0, _LOAD_LIMITS),
    MessageKind.LOADED: MessageType(Loaded, _UP, 256 * KIB, 0, "one record per shard, one line per operation"),
    MessageKind.STEP: MessageType(Step, _DOWN, MAX_METADATA_BYTES, MAX_PAYLOAD_BYTES, _STEP_LIMITS),
    MessageKind.STEP_RESULT: MessageType(StepResult, _UP, MAX_METADATA_BYTES, MAX_PAYLOAD_BYTES, _RESULT_LIMITS),
    MessageKind.DRAFT_STEP: MessageType(DraftStep, _DOWN, MAX_METADATA_BYTES, 0, "as Step, and a few ids per slice"),
    MessageKind.MASKS: MessageType(
        Masks, _DOWN, 4 * KIB, 64 * MIB, "three numbers; payload: 2,048 rows of a 262,144-word vocabulary"
    ),
    MessageKind.SCORE_WINDOW: MessageType(
        ScoreWindow, _DOWN, 1 * MIB, 0, "at most 5 bytes per token of a few thousand"
    ),
    MessageKind.WINDOW_SCORES: MessageType(
        WindowScores, _UP, 4 * KIB, 4 * MIB, "three numbers; payload: float32 scores of a window of 1 Mi tokens"
    ),
    MessageKind.ENCODE_IMAGE: MessageType(EncodeImage, _DOWN, 4 * KIB, MAX_PAYLOAD_BYTES, _IMAGE_LIMITS),
    MessageKind.IMAGE_ROWS: MessageType(ImageRows, _UP, 4 * KIB, MAX_PAYLOAD_BYTES, _IMAGE_LIMITS),
    MessageKind.CANCEL_PENDING: MessageType(CancelPending, _DOWN, 4 * KIB, 0, "one number"),
    MessageKind.PENDING_CANCELLED: MessageType(PendingCancelled, _UP, 64 * KIB, 0, "an id for each step in flight"),
    MessageKind.RESET: MessageType(Reset, _DOWN, 4 * KIB, 0, "one number"),
    MessageKind.RESET_DONE: MessageType(ResetDone, _UP, 4 * KIB, 0, "one number"),
    MessageKind.CHECK: MessageType(
        Check, _DOWN, 1 * MIB, TIMED_BYTES, "paths, as in Load; payload: zeros that time a link"
    ),
    MessageKind.UNLOAD: MessageType(Unload, _DOWN, 4 * KIB, 0, "one truth value"),
    MessageKind.UNLOADED: MessageType(Unloaded, _UP, 64 * KIB, 0, "two numbers and a problem"),
    MessageKind.CHECKED: MessageType(Checked, _UP, 1 * MIB, 0, "one line per device and layer"),
    MessageKind.SAVE: MessageType(Save, _DOWN, MAX_METADATA_BYTES, 0, _SAVE_LIMITS),
    MessageKind.SAVED: MessageType(Saved, _UP, 4 * KIB, 0, "three numbers"),
    MessageKind.RESTORE: MessageType(Restore, _DOWN, MAX_METADATA_BYTES, 0, "as Save"),
    MessageKind.RESTORED: MessageType(Restored, _UP, 4 * KIB, 0, "three numbers and a remark"),
    MessageKind.TRANSFER_FAILED: MessageType(TransferFailed, _UP, 1 * MIB, 0, "a traceback"),
    MessageKind.SHUTDOWN: MessageType(Shutdown, _DOWN, 64 * KIB, 0, "one sentence"),
    MessageKind.FAILED: MessageType(Failed, _UP, 1 * MIB, 0, "a traceback"),
    MessageKind.ROWS_COPY: MessageType(RowsCopy, _UP, 4 * KIB, MAX_PAYLOAD_BYTES, _ROWS_LIMITS),
    MessageKind.PLACED_ROWS: MessageType(PlacedRows, _DOWN, 4 * KIB, MAX_PAYLOAD_BYTES, _ROWS_LIMITS),
    MessageKind.HEARTBEAT: MessageType(Heartbeat, _UP, 4 * KIB, 0, "a dozen numbers", StreamKind.HEARTBEAT),
    MessageKind.PROGRESS: MessageType(Progress, _UP, 4 * KIB, 0, "a dozen numbers", StreamKind.HEARTBEAT),
    MessageKind.LOG_LINE: MessageType(
        LogLine, _UP, 256 * KIB, 0, "one record; the sender truncates long texts", StreamKind.HEARTBEAT
    ),
    MessageKind.ATTACH: MessageType(Attach, _UP, 4 * KIB, 0, "three numbers", StreamKind.ROWS),
    MessageKind.ATTACHED: MessageType(Attached, _UP, 4 * KIB, 0, "one truth value", StreamKind.ROWS),
    MessageKind.ROWS: MessageType(Rows, _UP, 4 * KIB, MAX_PAYLOAD_BYTES, _ROWS_LIMITS, StreamKind.ROWS),
    MessageKind.FILE_REQUEST: MessageType(FileRequest, _UP, 4 * KIB, 1 * MIB, _FILE_LIMITS, StreamKind.FILES),
    MessageKind.FILE_ANSWER: MessageType(FileAnswer, _DOWN, 4 * KIB, 1 * MIB, _FILE_LIMITS, StreamKind.FILES),
}
KIND_OF: dict[type[Message], MessageKind] = {message.record: kind for kind, message in MESSAGES.items()}
