"""Records of the handshake and of loading: what a daemon is and what it shall run.  No sockets, no tensors."""

from __future__ import annotations

import msgspec

from lucevisor.model.values import Backend, Dtype, FileIdentity, LayerRange


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
    source_hash: str  # of the code this interpreter imported: protocol, model, daemons
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

    ``embedding``: the first shard embeds token ids instead of reading boundary rows; ``output``: the last shard makes
    logits and samples instead of writing them.  ``source`` and ``target`` index ``Load.arenas``: the incoming boundary,
    None exactly with ``embedding``, and the outgoing one, None exactly with ``output``.
    """

    stage: int
    shards: list[ShardPlan]
    source: int | None
    target: int | None
    embedding: bool
    output: bool
    model: int = 0  # which of the deployment's models the layers belong to; 0: the one that answers
    captures: list[int] = []  # layers whose residual stream is kept for a drafter


def arena_regions(n_stages: int) -> int:
    """Regions of an arena, and the most steps in flight: one for each stage, and one that waits at the first."""
    return n_stages + 1


class ArenaPlan(msgspec.Struct, frozen=True):
    """A ring of ``n_regions`` regions of ``region_bytes`` in a memfd; descriptors travel with the Load frame, same
    order."""

    boundary: int  # index of the boundary: between stage ``boundary`` and ``boundary + 1``
    region_bytes: int
    n_regions: int


class PoolSizes(msgspec.Struct, frozen=True):
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
    pools: PoolSizes
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
    kernels: dict[str, str]  # op or quant type -> implementation selected for it
    seconds: float  # until the weights lay there, without what compiling kernels took
    identities: list[FileIdentity] = []  # of the files that were read, the same before and after reading
