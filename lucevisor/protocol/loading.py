"""Records of the handshake and of loading: what a daemon is, and what it should run.  No sockets, no tensors."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

import msgspec

from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, FileIdentity, KvGroup, LayerRange, Tier
from lucevisor.protocol.steps import Step


class DeviceInfo(msgspec.Struct, frozen=True):
    """One device as the daemon's torch sees it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    architecture: str  # "sm_90", "gfx1151", "x86_64+avx512_bf16"
    dtypes: list[Dtype]  # formats with native matrix products
    uuid: str = ""  # the same in all processes that see a GPU


class Hello(msgspec.Struct, frozen=True):
    """First message of a daemon, sent before it allocates anything on a device."""

    protocol: int
    source_hash: str  # of the code this interpreter imported: protocol, model, daemons
    pid: int
    python: str  # version
    executable: str
    torch: str  # torch.__version__
    backend: Backend  # what torch is built for; cpu where it was asked for
    devices: list[DeviceInfo]
    host_total_bytes: int
    packages: dict[str, str]  # versions of numpy, gguf, msgspec and, if installed, triton
    device_problem: str = ""  # why there are no ``devices``
    rows_address: str = ""  # HOST:PORT/CHANNEL where neighbours connect that share no memory; empty: it does not listen


class ShardPlan(msgspec.Struct, frozen=True):
    """One contiguous layer range on one device of the group."""

    device: int
    layers: LayerRange


class StagePlan(msgspec.Struct, frozen=True):
    """Consecutive shards of one group, run in one call.

    ``embedding``: the first shard embeds token ids instead of reading boundary rows; ``output``: the last shard
    computes logits and samples instead of writing rows. ``source`` and ``target`` index ``Load.arenas``, None with
    these. ``captures``: layers whose residual stream the drafter reads: rows [T, n E] in that order, in
    ``Load.arenas[capture_target]``, or if that is None in memory of this daemon, which runs the draft stage too."""

    stage: int
    shards: list[ShardPlan]
    source: int | None
    target: int | None
    embedding: bool
    output: bool
    captures: list[int] = []
    capture_target: int | None = None
    tokens: int | None = None  # indexes Load.arenas, of the first and the output stage of several: sampled tokens


class DraftKind(StrEnum):
    """A drafter model: how drafts are made and what state it keeps."""

    DFLASH = "dflash"  # versions 1 and 2, told apart by their tensors
    MTP = "mtp"  # of the served model's file, or a file of its own
    MODEL = "model"  # a smaller model with the same vocabulary


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of speculative decoding. ``max_drafts``: drafts that a slice may verify; 0: it is off. ``drafter``: a
    draft stage may be attached. ``lookup``: drafts are also looked up in the sequence's own tokens. ``fixed``: always
    ``max_drafts``. ``max_lookup``: looked-up drafts of a sequence that copies and decodes alone, if more."""

    max_drafts: int = 0
    max_lookup: int = 0
    drafter: bool = False
    lookup: bool = False
    kind: DraftKind = DraftKind.MTP
    fixed: bool = False

    def step_drafts(self, n_sequences: int) -> int:
        """Return the most drafts of a step of so many sequences."""
        return max(n_sequences * self.max_drafts, self.max_lookup)


class CaptureSource(msgspec.Struct, frozen=True):
    """Source of a stage's captures for the draft stage: ``arena`` indexes ``Load.arenas``; None: in this daemon."""

    stage: int
    layers: list[int]
    arena: int | None


class DraftPlan(msgspec.Struct, frozen=True):
    """The draft stage, numbered after the output stage: a drafter on one device. ``files``: in order; the embedding and
    the output matrix that they lack are read from the served model's. ``sources``: in the order of the layers. Its
    pools have the page and state ids of the served model's pools."""

    stage: int
    kind: DraftKind
    files: list[str]
    device: int
    layers: LayerRange  # of the drafter
    sources: list[CaptureSource]
    identities: list[FileIdentity] = []  # expected of ``files``; [] = not compared


class ScorePlan(msgspec.Struct, frozen=True):
    """The scoring model of PFlash: a whole model on one device, without its output matrix. ``window_tokens``: positions
    of its pool; ``step_tokens``: the most tokens of one ScoreWindow."""

    files: list[str]
    device: int
    window_tokens: int
    step_tokens: int


class VisionPlan(msgspec.Struct, frozen=True):
    """The vision stage: an encoder on one device.  ``max_tokens``: the most of an image; ``dtype``: of its
    matrices."""

    files: list[str]
    device: int
    max_tokens: int
    dtype: Dtype


def arena_regions(n_stages: int) -> int:
    """Regions of an arena, and the most steps in flight: for each stage, the draft stage included, one that runs and
    one that waits."""
    return 2 * n_stages


class RowsConnection(msgspec.Struct, frozen=True):
    """Connection between the two ends of boundary memory that they do not share. ``epoch``: of this load. ``address``:
    ``Hello.rows_address`` of the other end; empty: that connects to this daemon. ``copies``: the supervisor gets the
    rows, too."""

    epoch: int
    address: str = ""
    copies: bool = True


class ArenaPlan(msgspec.Struct, frozen=True):
    """A ring of ``n_regions`` regions of ``region_bytes`` in one memfd.  Descriptors travel with the Load frame, in the
    same order, then an eventfd for each, on which its reader sleeps.  With a ``connection`` each end has memory of its
    own, and no descriptor travels."""

    boundary: int  # between stage ``boundary`` and the next one; with ``capture`` from that stage to the draft stage
    region_bytes: int
    n_regions: int
    capture: bool = False
    tokens: bool = False  # sampled ones and drafts, from the output stage, ``boundary``, to the first one
    connection: RowsConnection | None = None

    @property
    def key(self) -> tuple[bool, int]:
        """What no other arena of a placement has."""
        return self.capture, self.boundary


def token_region_bytes(max_sequences: int, max_drafts: int = 0) -> int:
    """Bytes of the tokens of a step, or of the drafts behind it, int64: the number of sequences, that of the tokens of
    each, the sequences, the tokens."""
    return 8 * (2 + max_sequences * (1 + max(1, max_drafts)))


class StatePlace(NamedTuple):
    """Place of a recurrent state, or of a draft's updates and windows: its memory, and its row there."""

    tier: Tier
    row: int


class PoolSizes(msgspec.Struct, frozen=True):
    """Number of pages and states in each pool, the same in every shard.  Ids run from 0 to n-1.

    Ids of recurrent states: those on the device, which alone may be live; ``draft_states`` after verified drafts, of
    which there is only what tokens do to the state before them (updates, and windows of the convolution);
    ``host_states`` in the daemon's host memory, which hold checkpoints.
    ``host_pages`` pages of KV group full lie there, too, with ids from ``full_pages`` on: what KV Flash paged out.
    ``state_pages``: state s of the device shares its memory with so many pages, from ``s * state_pages`` on, and only
    one of the two may be in use (:mod:`lucevisor.model.extents`); 0: states have memory of their own.
    """

    full_pages: int
    window_pages: int
    states: int  # recurrent states that are whole: live ones and checkpoints
    host_states: int = 0
    host_pages: int = 0
    draft_states: int = 0
    state_pages: int = 0

    def place_of_state(self, state: int) -> StatePlace:
        """Return where a recurrent state lies.  The only place that derives a tier from an id."""
        n = self.device_rows
        return StatePlace(Tier.DEVICE, state) if state < n else StatePlace(Tier.HOST, state - n)

    def is_draft_state(self, state: int) -> bool:
        """Return whether an id is that of a draft's updates and windows, usable only by a verify slice and UseState."""
        return self.device_states <= state < self.device_rows

    @property
    def device_states(self) -> int:
        """Whole recurrent states in device memory: ids below this may be live."""
        return self.states - self.host_states

    @property
    def device_rows(self) -> int:
        """Rows on the device of what is kept for drafts' states, too: where the ids of host memory begin."""
        return self.device_states + self.draft_states

    @property
    def n_state_ids(self) -> int:
        return self.states + self.draft_states


def score_pools(kv_groups: Collection[KvGroup], window_tokens: int) -> PoolSizes:
    """Return the pools of one window of a scoring model with layers of these KV groups."""
    n_pages = -(-window_tokens // PAGE_TOKENS)
    return PoolSizes(
        full_pages=n_pages if KvGroup.FULL in kv_groups else 0,
        window_pages=n_pages if KvGroup.WINDOW in kv_groups else 0,
        states=1 if KvGroup.RECURRENT in kv_groups else 0,
    )


class StageReplay(msgspec.Struct, frozen=True):
    """The steps that bring a stage's new daemon to where the lost one was, to be run layer by layer while it loads.
    ``first_row``: where their boundary rows lie in the file of rows, one behind the other."""

    stage: int
    steps: list[Step]
    first_row: int = 0


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter: its name for sequences, its file, and the factor of what it adds.  ``identity``: expected of the
    file."""

    name: str
    file: str
    scale: float
    identity: FileIdentity


class OfferedFile(msgspec.Struct, frozen=True):
    """A file of a model at the supervisor, whose first ``header_bytes`` are its header."""

    path: str
    header_bytes: int
    identity: FileIdentity


class Load(msgspec.Struct, frozen=True):
    """Load these layers and run them.  ``max_drafts``: the most that a slice verifies; 0: none, here or anywhere.
    ``max_lookup``: those of a sequence that copies alone, if they are more.

    ``replay``: what stages are to have computed when they are loaded; the descriptor of the file of rows follows those
    of the arenas.  ``offered``: all files that are named here, for a daemon that may not have them; their descriptors
    come last.  Without ``warm_up`` kernels are compiled, and graphs captured, when steps come to need them.
    ``parkable``: its memory on GPUs can be given back and had again at the same addresses (sleep mode).
    ``shared_process``: other models of the process serve, so a load that fails is answered by Unloaded.  A process that
    has loaded this before has the boundary memory, and gets no ``arenas``.
    """

    files: list[str]  # absolute paths of the GGUF parts, in order
    dtype: Dtype  # of activations and of boundary activations
    kv_dtype: Dtype
    stages: list[StagePlan]
    arenas: list[ArenaPlan]
    pools: PoolSizes
    max_sequences: int
    max_step_tokens: int
    threads: int = 0  # cpu: 0 = torch's choice
    options: dict[str, str] = {}  # model options such as yarn_attn_factor
    identities: list[FileIdentity] = []  # expected of ``files``; [] = not compared
    draft: DraftPlan | None = None
    max_drafts: int = 0
    max_lookup: int = 0
    attend_host: bool = False  # layers attend to pages in host memory, too
    rank_pages: bool = False  # slices may ask how much they attend to each page
    score: ScorePlan | None = None
    vision: VisionPlan | None = None
    replay: list[StageReplay] = []
    warm_up: bool = True
    deterministic: bool = False  # a row's bits depend on its sequence alone
    spin_s: float = 0.0  # how long a stage polls the doorbell of a step's rows before it sleeps
    offered: list[OfferedFile] = []
    shared_process: bool = False
    parkable: bool = False
    adapters: list[AdapterFile] = []
    max_attended: int = 0  # positions that a slice attends to at most, as the warm-up runs it; 0: not told


class DeviceUse(msgspec.Struct, frozen=True):
    """Memory that a shard takes on its device, measured after loading."""

    device: int
    layers: LayerRange
    weight_bytes: int
    state_bytes: int
    free_bytes: int
    host_state_bytes: int = 0  # state in host memory, in addition


class Loaded(msgspec.Struct, frozen=True):
    """Answer to Load: the stages are ready for steps."""

    shards: list[DeviceUse]
    kernels: dict[str, str]  # op or quant type -> implementation selected for it
    seconds: float  # to load the weights, without compiling kernels
    identities: list[FileIdentity] = []  # of the files that were read: the model's, adapters', then the drafter's
    draft: DeviceUse | None = None  # of the draft stage
    draft_problem: str = ""  # why the draft stage does not run although other stages of the daemon do
    score: DeviceUse | None = None  # of the scoring model
    score_problem: str = ""  # the same for the scoring model
    vision: DeviceUse | None = None  # of the vision encoder
    vision_problem: str = ""  # the same for the vision encoder
    replayed: bool = False  # all of ``Load.replay`` is computed; else the daemon holds no sequences
    warnings: list[str] = []  # what costs speed and can be fixed
    workspace_bytes: dict[int, int] = {}  # of GPUs, by index: steps' peak, pools of graphs, what torch rounds up
