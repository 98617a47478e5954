"""Every message that crosses a link or a pulse, as typed records.

A frame's kind number selects the record, so metadata carries no type tag; :data:`MESSAGES` is the only table of kinds.
Records on the hot path (``Step``, ``StepResult``) are encoded as arrays.  This file knows no sockets and no tensors.

Direction: ``link`` carries Load, Step, Reset, Check, Save, Restore, Shutdown down and Hello, Loaded, StepResult,
Failed, Checked, Saved, Restored up;
``pulse`` carries Heartbeat, Progress and LogLine up.

Longer than files here are: records and no code, the whole protocol at one place, from which docs/protocol.md is made.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec

from lucevisor.model.values import Backend, Dtype, FileIdentity, LayerRange, Sampling, Space

PROTOCOL_VERSION = 1

TRANSFER_BASE = 1 << 61
"""Ids of transfers start here, far above any step id: both come back as the request id of a frame."""

RESET_BASE = 1 << 62
"""Tokens of Reset start here, far above any step id: both come back as a StepResult's step_id."""


class Kind(IntEnum):
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
    HEARTBEAT = 32
    PROGRESS = 33
    LOG_LINE = 34


# ---- hello and load


class DeviceInfo(msgspec.Struct, frozen=True):
    """One device as the daemon's torch sees it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    architecture: str  # "sm_90", "gfx1151", "x86_64+avx512_bf16"
    dtypes: list[Dtype]  # formats this device multiplies natively


class Hello(msgspec.Struct, frozen=True):
    """First message of a daemon, before it touches a device for weights."""

    protocol: int
    source_hash: str  # of the wire package and the daemons package as imported by this interpreter
    pid: int
    python: str  # version
    executable: str
    torch: str  # torch.__version__
    backend: Backend
    devices: list[DeviceInfo]
    host_total_bytes: int
    packages: dict[str, str]  # numpy, gguf, msgspec, triton (when there)


class ShardPlan(msgspec.Struct, frozen=True):
    """One contiguous layer range on one device of the group."""

    device: int
    layers: LayerRange


class StagePlan(msgspec.Struct, frozen=True):
    """Consecutive shards of one group, run in one call.

    ``source`` / ``target`` name the arenas (indices into ``Load.arenas``) of the incoming and outgoing boundary;
    None at
    the head (reads token ids) and at the tail (applies the head and samples).
    """

    stage: int
    shards: list[ShardPlan]
    source: int | None
    target: int | None


class ArenaPlan(msgspec.Struct, frozen=True):
    """A ring of ``n_regions`` regions of ``region_bytes`` in a memfd; descriptors travel with the Load frame, same
    order."""

    boundary: int  # index of the boundary: between stage ``boundary`` and ``boundary + 1``
    region_bytes: int
    n_regions: int


class Pools(msgspec.Struct, frozen=True):
    """Sizes of the id spaces; the same in every shard.  Ids run from 0 to n-1.

    The last ``host_states`` of the recurrent states lie in the daemon's host memory: they hold checkpoints and are
    never live.
    """

    full_pages: int
    window_pages: int
    states: int  # recurrent states: live ones and checkpoints
    host_states: int = 0

    @property
    def device_states(self) -> int:
        """Recurrent states on the devices: ids below this one may be live."""
        return self.states - self.host_states


class Load(msgspec.Struct, frozen=True):
    """What a daemon loads and runs."""

    files: list[str]  # absolute paths of the GGUF parts, in order
    dtype: Dtype  # of activations and of boundary activations
    kv_dtype: Dtype
    stages: list[StagePlan]
    arenas: list[ArenaPlan]
    pools: Pools
    max_sequences: int
    max_step_tokens: int
    threads: int = 0  # cpu: 0 = torch's choice
    options: dict[str, str] = {}  # model options such as yarn_attn_factor
    identities: list[FileIdentity] = []  # of ``files`` as the running plan knows them; [] = not compared


class DeviceUse(msgspec.Struct, frozen=True):
    """Memory a shard took on its device, measured after loading."""

    device: int
    layers: LayerRange
    weight_bytes: int
    state_bytes: int
    free_bytes: int
    host_state_bytes: int = 0  # of its state, what lies in host memory beside that


class Loaded(msgspec.Struct, frozen=True):
    """Answer to Load: the stages are ready for steps."""

    shards: list[DeviceUse]
    kernels: dict[str, str]  # op or quant type -> implementation the chooser took
    seconds: float  # until the weights lay there, without what compiling kernels took
    identities: list[FileIdentity] = []  # of the files that were read, the same before and after reading


# ---- steps


class OpenSequence(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Start a sequence.  ``state`` is its live recurrent state; ``history`` (ids already in the context that no
    slice will
    carry) seeds the penalties."""

    sequence: int
    state: int
    sampling: Sampling
    history: list[int] = []


class CloseSequence(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Forget a sequence.  Its pages and state belong to the supervisor again."""

    sequence: int


class SetPages(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``table[space][first : first + len(pages)] = pages``: entry i holds positions [64 i, 64 i + 64)."""

    sequence: int
    space: Space
    first: int
    pages: list[int]


class CopyPage(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Copy the first ``n_tokens`` positions of a page (copy-on-write of a partial page)."""

    space: Space
    source: int
    target: int
    n_tokens: int


class CopyState(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Copy a recurrent state (take a checkpoint, or start from one)."""

    source: int
    target: int


class ZeroState(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Reset a recurrent state to the start of a text."""

    state: int


Operation = OpenSequence | CloseSequence | SetPages | CopyPage | CopyState | ZeroState


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence in a step: ``tokens[i]`` stands at position ``start + i``.

    ``sample``: draw the next token from the last row.  A decode is a slice of one token, a chunk a longer one, a verify
    one whose every row is judged.
    """

    sequence: int
    start: int
    tokens: list[int]
    sample: bool


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The step plan: operations first, in order, then the slices, then what is wanted back.

    ``region`` is the arena region that carries this step's boundary activations, rows in slice order.
    Operations are executed by every stage; a stage runs its steps in the order received.
    """

    step_id: int
    region: int
    operations: list[Operation] = []
    slices: list[Slice] = []
    want_logits: bool = False  # tail: float32 logits [T, V] of every row, as payload
    want_hidden: bool = (
        False  # each stage: float32 residual stream [n_layers of the stage (+1 at the head), T, E], as payload
    )

    @property
    def n_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.slices)


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """A token drawn by the tail.  ``logprob`` of it and the ``top`` (id, log-probability) pairs, when asked for."""

    sequence: int
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """A stage finished a step; the boundary rows (if any) are in the arena region."""

    step_id: int
    stage: int
    sampled: list[Sampled] = []
    compute_s: float = 0.0  # from plan received to rows ready
    wait_s: float = 0.0  # how long the compute thread had waited for this plan
    segments: list[tuple[str, list[int]]] = []  # payload: (name, shape) of float32 arrays, one after the other


class Failed(msgspec.Struct, frozen=True):
    """A daemon could not do what a message asked.  ``fatal``: it exits after this message."""

    what: str  # "load", "step 17", "check"
    where: str  # "hip:1 layers [20,40)", a file, a tensor
    reason: str
    advice: str
    fatal: bool
    configuration: bool = False  # the same start would fail again: do not retry
    details: str = ""  # traceback


class Reset(msgspec.Struct, frozen=True):
    """Drop every sequence; weights and pools stay.  Answered by a StepResult with ``step_id`` = ``token``."""

    token: int


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Layers to time on a device, with the head when ``first``, with the tail when ``last``."""

    device: int
    layers: LayerRange
    first: bool = False
    last: bool = False


class Measure(msgspec.Struct, frozen=True):
    """Time each of ``spans`` for a slice of ``n_rows`` tokens from position 0, and for one token behind it."""

    spans: list[Span]
    kv_dtype: Dtype
    n_rows: int
    threads: int = 0
    options: dict[str, str] = {}


class Check(msgspec.Struct, frozen=True):
    """Doctor: run one layer's numbers on every visible device against the float32 cpu reference; map ``arenas``
    (descriptors travel along).  With ``measure``: time layers instead of comparing one."""

    files: list[str]
    layer: int
    dtype: Dtype
    arenas: list[ArenaPlan] = []
    measure: Measure | None = None


class CheckLine(msgspec.Struct, frozen=True):
    subject: str  # "cuda:0 layer 3", "arena"
    ok: bool
    detail: str


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that the layers of a Span take, for one token and for ``Measure.n_rows``; ``end_``: its head and tail,
    the tail for one row in both."""

    decode_s: float
    prefill_s: float
    end_decode_s: float = 0.0
    end_prefill_s: float = 0.0


class Checked(msgspec.Struct, frozen=True):
    """Answer to Check.  ``timings``: one a Span, in their order; none when one failed, which is a line then."""

    lines: list[CheckLine]
    timings: list[Timing] = []


class Shutdown(msgspec.Struct, frozen=True):
    """End in order.  End of file on the link means the same."""

    reason: str = ""


# ---- snapshots


class SnapshotTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a snapshot file (docs/snapshot-format.md), and where its bytes lie.

    ``kind`` names it among those of its ``layer``: the name of a state tensor, with ``.scale`` behind it for the scales
    of q8_0.  Axis 0 of a paged one are positions, from ``first`` on (window layers keep what is still visible).
    """

    name: str
    layer: int  # absolute
    kind: str
    dtype: str  # as safetensors writes it: F32, BF16, F16, I8
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    n_bytes: int
    first: int = 0


class SlotPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a prefix slot of ``n_tokens`` lies, or shall lie, in the pools.

    ``full[i]`` holds positions [64 i, 64 i + 64), ``window[i]`` those of entry ``first_window + i``; ``state`` is its
    recurrent state, -1 without one.
    """

    n_tokens: int
    full: list[int] = []
    window: list[int] = []
    first_window: int = 0
    state: int = -1


class Save(msgspec.Struct, frozen=True):
    """Write ``tensors``, those of the daemon's own layers, into a snapshot file; its descriptor travels along.

    The supervisor leaves every page and state of ``place`` unchanged until the answer, so steps go on meanwhile.
    ``file`` is for error messages.  Answered by Saved, or by Failed that is not fatal; both carry the request id
    ``transfer``.
    """

    transfer: int
    file: str
    place: SlotPlace
    tensors: list[SnapshotTensor]


class Saved(msgspec.Struct, frozen=True):
    transfer: int
    n_bytes: int
    seconds: float


class Restore(msgspec.Struct, frozen=True):
    """Read ``tensors`` from a snapshot file into the pages and the state of ``place``, which no sequence uses yet.

    They belong to the transfer until the answer: Restored, or Failed that is not fatal; both carry the request id
    ``transfer``.  ``place.n_tokens`` may be less than the file holds.
    """

    transfer: int
    file: str
    place: SlotPlace
    tensors: list[SnapshotTensor]


class Restored(msgspec.Struct, frozen=True):
    transfer: int
    n_bytes: int
    seconds: float
    converted: str = ""  # "BF16 to float32" when file and pools hold different number formats


# ---- pulse


class Heartbeat(msgspec.Struct, frozen=True):
    """Says that the process lives, and for how long its compute thread has been busy with one thing."""

    count: int
    phase: Literal["start", "load", "idle", "step", "check"]
    busy_s: float  # in this phase, for load since the last progress
    step_id: int
    n_steps: int
    n_tokens: int
    rss_bytes: int
    free_bytes: list[int]  # per device


class Progress(msgspec.Struct, frozen=True):
    """Load progress of one shard."""

    stage: int
    device: int
    done_bytes: int
    total_bytes: int
    phase: str  # "read", "convert", "pools", "warm up"


class LogLine(msgspec.Struct, frozen=True):
    """A structured log record of the daemon."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: dict[str, str | int | float | bool | None] = {}


Message = (
    Hello
    | Load
    | Loaded
    | Step
    | StepResult
    | Failed
    | Reset
    | Check
    | Checked
    | Shutdown
    | Save
    | Saved
    | Restore
    | Restored
    | Heartbeat
    | Progress
    | LogLine
)

MESSAGES: dict[Kind, type[Message]] = {
    Kind.HELLO: Hello,
    Kind.LOAD: Load,
    Kind.LOADED: Loaded,
    Kind.STEP: Step,
    Kind.STEP_RESULT: StepResult,
    Kind.FAILED: Failed,
    Kind.RESET: Reset,
    Kind.CHECK: Check,
    Kind.CHECKED: Checked,
    Kind.SHUTDOWN: Shutdown,
    Kind.SAVE: Save,
    Kind.SAVED: Saved,
    Kind.RESTORE: Restore,
    Kind.RESTORED: Restored,
    Kind.HEARTBEAT: Heartbeat,
    Kind.PROGRESS: Progress,
    Kind.LOG_LINE: LogLine,
}
