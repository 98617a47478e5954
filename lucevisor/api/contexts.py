"""What handlers share: of the server, of each model, and of each request."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec import Meta

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.images import ImageReader
from lucevisor.api.keys import ApiKeys, Caller
from lucevisor.api.prepared import ModelLoadRequest, PreparedRequest
from lucevisor.api.schemas import convert
from lucevisor.api.sse import EventStream
from lucevisor.compression.compressor import Compressor
from lucevisor.engine.request import GenerationRequest, RequestHandle
from lucevisor.engine.shell import Engine
from lucevisor.errors import LucevisorError, VisionError, show
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.spec import LAST_ROW, Pooling
from lucevisor.model.vision import EncoderImage
from lucevisor.snapshots.store import SnapshotStore
from lucevisor.text.grammar.matcher import GrammarCompiler
from lucevisor.text.normalise import Normalise
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request.  Times in seconds, `started_s` and `ended_s` on the monotonic clock, the others from the start."""

    request_id: str
    started_s: float
    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    status: int = 0
    ended_s: float = 0.0
    caller: Caller = field(default_factory=Caller)
    stream: EventStream | None = None
    handles: Sequence[RequestHandle] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    accepted_tokens: int = 0  # accepted drafts among the generated tokens
    rejected_tokens: int = 0  # drafts that were verified and rejected
    queue_s: float = 0.0
    first_token_s: float | None = None
    fields: dict[str, object] = field(default_factory=dict)  # further fields of the log line

    @property
    def error(self) -> str:
        """The message of the error that the client got, or empty."""
        return str(self.fields.get("error", ""))

    def cancel(self) -> None:
        """Cancel the request's sequences.  Its handler gets their last events and answers the client."""
        for handle in self.handles:
            handle.cancel()


BodyParser = Callable[[dict[str, Any], "ModelContext"], PreparedRequest | ModelLoadRequest | bytes]
"""Function that prepares the request in a decoded body, or returns the JSON answer.  Raises ApiError.

A module-level function, because workers unpickle it by name.  The docstring of one that answers alone is its
summary in /openapi.json.
"""


ParsedBody = tuple[PreparedRequest | ModelLoadRequest | bytes, str]
"""What a BodyParser returned, and the model that the body named."""


class Preprocessing(Protocol):
    """Interface of the preprocessing workers."""

    def start(self, models: ServedModels, /) -> None: ...

    async def parse(self, parser: BodyParser, body: Sequence[bytes], models: ServedModels, /) -> ParsedBody: ...

    async def close(self) -> None: ...


class ServingEngine(Protocol):
    """The engine of a model, or the router of its replicas."""

    def submit(self, request: GenerationRequest, /) -> RequestHandle:
        """See :meth:`lucevisor.engine.shell.Engine.submit`."""

    @property
    def replicas(self) -> Mapping[str, Engine]:
        """Its engines, by replica; the name of a lone one is empty."""


@dataclass(frozen=True, slots=True)
class _AdaptedEngine:
    """The engine of a model for texts with a LoRA adapter."""

    engine: ServingEngine
    adapter: str

    def submit(self, request: GenerationRequest, /) -> RequestHandle:
        return self.engine.submit(replace(request, prompt=TokenBuffer(request.prompt, self.adapter)))

    @property
    def replicas(self) -> Mapping[str, Engine]:
        return self.engine.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Description of the served model. `aliases`: patterns of other names that requests may use. `created_s`: Unix
    time; `fingerprint`: changes whenever outputs may change; `facts`: the file's metadata but lists. `adapters`: LoRA
    adapters, which are models to clients, with a `parent` and a `scale`."""

    name: str
    created_s: int
    fingerprint: str = ""
    size_bytes: int = 0
    path: str = ""
    architecture: str = ""
    quant: str = ""
    n_parameters: int = 0
    aliases: tuple[str, ...] = ()
    adapters: tuple[ModelCard, ...] = ()
    parent: str = ""
    scale: float = 1.0
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def tagged(self) -> str:
        """The name with a tag, as Ollama writes it; its clients add `:latest` to a name without one."""
        return self.name if ":" in self.name else f"{self.name}:latest"

    def is_named(self, name: str) -> bool:
        """Return whether a name is that of the model, or Ollama's form of it."""
        return name in (self.name, self.tagged)

    def alias_length(self, name: str) -> int:
        """Return the length of the longest alias that a name, or Ollama's form of it, matches; 0: none does.

        The name of the model's file without its ending is one.
        """
        plain = name.removesuffix(":latest")
        if plain == PurePath(self.path).stem:
            return len(plain)
        matching = (alias for alias in self.aliases if fnmatchcase(name, alias) or fnmatchcase(plain, alias))
        return max(map(len, matching), default=0)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default sampling parameters, as a model card sets them; the field defaults are those of OpenAI's API."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], plain: SamplingDefaults | None = None) -> SamplingDefaults:
        """Read `general.sampling.*`; keys that are absent, not numbers or out of range keep what `plain` has."""
        keys = {name: name for name in ("top_k", "top_p", "min_p")}
        keys |= {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
        found = msgspec.to_builtins(plain or cls())
        for name, key in keys.items():
            with suppress(msgspec.ValidationError):
                own = msgspec.convert({name: metadata.get(f"general.sampling.{key}")}, cls)
                found[name] = getattr(own, name)
        return cls(**found)


@dataclass(frozen=True, slots=True)
class NotReadyPart:
    """Something that keeps the pipeline from being ready: `name` as in the configuration, such as "group left"."""

    name: str
    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Limits of the HTTP side.  `host` is the configured bind address; times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    allow_open: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0  # from the head of a request to the end of its body
    max_bodies_bytes: int = 256 * 1024 * 1024  # of all bodies in memory; beyond it: 429
    preprocess_memory_bytes: int = 1024 * 1024 * 1024  # per body; beyond it: 413
    preprocess_timeout_s: float = 60.0  # per body; beyond it: 413
    stored_responses: int = 1024  # of the Responses API; the least recently used go first
    stored_bytes: int = 64 * 1024 * 1024  # of all of them, with their conversations
    max_waiting_bodies: int = 1024  # bodies waiting for a worker; beyond it: 429
    write_timeout_s: float = 60.0  # for a client to read 16 KiB of buffered data
    head_timeout_s: float = 10.0  # from the connection, or the first byte of a later request, to the end of the head
    idle_timeout_s: float = 75.0  # between two requests of a connection
    max_connections: int = 1024
    keepalive_s: float = 15.0  # silence before a stream gets a comment line, so that proxies keep it open
    retry_after_s: int = 5  # Retry-After of a 503 while groups start


RETRY_AFTER_S: Final = (1, 3600)
"""Bounds of Retry-After."""


def _no_restart(group: str, now: bool, /) -> None:
    raise LucevisorError(f"group {group!r} cannot be restarted here")


class ModelControl(Protocol):
    """Loads and unloads a model."""

    @property
    def state(self) -> str:
        """The state as status and metrics show it: unloaded, parked, loading, loaded or leaving."""

    @property
    def problem(self) -> str:
        """Why the model could not be loaded the last time; empty if it could."""

    @property
    def unloads_in_s(self) -> float | None:
        """Seconds until it is unloaded unless a request comes; None: it stays."""

    async def load(self) -> None:
        """Load it; returns when it is loaded.  Raises LucevisorError."""

    async def unload(self) -> None:
        """Unload it when it has no requests; returns when its memory is free.  Raises LucevisorError."""

    def keep_alive(self, seconds: float) -> None:
        """Unload it after so long without requests from now on; negative: never, 0: as soon as it has none."""


async def _no_encoder(_: EncoderImage, /) -> memoryview:
    raise VisionError("there is no vision encoder")


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """The server, for all handlers.  `not_ready` must not block; it returns () when the pipelines are ready."""

    settings: ApiSettings = field(default_factory=ApiSettings)
    keys: ApiKeys = field(default_factory=ApiKeys)
    admin_keys: ApiKeys = field(default_factory=ApiKeys)  # without any, nobody restarts over HTTP
    preprocessor: Preprocessing | None = None  # None: long bodies are rejected
    not_ready: Callable[[], Sequence[NotReadyPart]] = tuple
    status: Callable[[], Mapping[str, Any]] = lambda: {"groups": []}  # the JSON of `lucevisor status --json`
    restart: Callable[[str, bool], None] = _no_restart  # begin it; True: do not wait for running requests
    trace: Callable[[RequestContext], str] = lambda _: ""  # record a request that has ended; return its trace id
    log_drops: Callable[[], Mapping[str, int]] = dict  # log records that were not written, by sink


@dataclass(slots=True, kw_only=True)
class ModelContext:
    """One served model, for all handlers.  `engine` and what the placement decides are set later."""

    model: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    server: ServerContext = field(default_factory=ServerContext)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    direct_defaults: SamplingDefaults | None = None  # where a prompt switches thinking off; None: as otherwise
    efforts: Mapping[str, int] = field(default_factory=dict)  # thinking budgets in place of the usual ones
    stop_ids: frozenset[int] = frozenset()  # tokens that end an answer besides the file's own
    retry_in_s: Callable[[], float | None] = lambda: None  # until lost groups are started again; None: not waiting
    snapshots: Callable[[], SnapshotStore | None] = lambda: None  # None while they are off
    normalise: Normalise = "off"  # volatile lines of system prompts
    banned: tuple[int, ...] = ()  # ids never sampled: unused rows of the vocabulary
    pooling: Pooling = LAST_ROW
    pooled_width: int = 0  # numbers of an embedding
    engine: ServingEngine | None = None
    control: ModelControl | None = None  # None: the model is always loaded
    compressor: Compressor | None = None  # of PFlash; None while it is off
    images: ImageReader | None = None  # None: requests with images are refused
    encode_image: Callable[[EncoderImage], Awaitable[memoryview]] = _no_encoder  # to embedding rows
    max_context: int = 0  # tokens; 0: not known yet
    max_sequences: int = 0
    boundary_row_bytes: int = 0  # of a token's hidden states, from stage to stage
    grammars: GrammarCompiler = field(init=False)

    def __post_init__(self) -> None:
        self.grammars = GrammarCompiler(self.tokenizer)

    @property
    def adapter(self) -> str:
        """The LoRA adapter that requests are computed with; empty: none."""
        return self.model.name if self.model.parent else ""

    def of_adapter(self, card: ModelCard) -> ModelContext:
        """Return the context of requests for a LoRA adapter of the model, as of now."""
        own = copy(self)
        own.model = card
        own.engine = None if self.engine is None else _AdaptedEngine(self.engine, card.name)
        return own

    @property
    def max_prompt(self) -> int:
        """One more than the tokens of the longest prompt; with PFlash, of one that fits when it is shortened."""
        if self.compressor is None:
            return self.max_context
        return min(2**20, int(self.max_context / self.compressor.settings.min_share))

    @property
    def model_state(self) -> str:
        return "loaded" if self.control is None else self.control.state

    def retry_after_s(self) -> int:
        """Return the Retry-After of a 503 while the pipeline is down."""
        wait_s, (least, most) = self.retry_in_s(), RETRY_AFTER_S
        return self.server.settings.retry_after_s if wait_s is None else min(most, max(least, math.ceil(wait_s)))


class _LoraScale(msgspec.Struct):
    """One entry of llama.cpp's `lora`."""

    id: int
    scale: float


class ServedModels:
    """The contexts of the served models, in the order of the configuration."""

    def __init__(self, contexts: Sequence[ModelContext]) -> None:
        self.first, self.server = contexts[0], contexts[0].server
        self._contexts = {ctx.model.name: ctx for ctx in contexts}

    def __iter__(self) -> Iterator[ModelContext]:
        return iter(self._contexts.values())

    def __len__(self) -> int:
        return len(self._contexts)

    def __getitem__(self, name: str) -> ModelContext:
        """Return the context of a model, or an adapter, by its exact name."""
        return self._contexts.get(name) or next(ctx for ctx in self.listed() if ctx.model.name == name)

    def listed(self) -> Iterator[ModelContext]:
        """Yield the context of each model, and of its adapters behind it."""
        for ctx in self:
            yield ctx
            yield from map(ctx.of_adapter, ctx.model.adapters)

    def find(self, name: object) -> ModelContext:
        """Return the context of the model that a request names; raises ApiError. One model serves all requests but
        those for its adapters: their readers check the name, which may be missing."""
        for ctx in self.listed():
            if ctx.adapter and isinstance(name, str) and ctx.model.is_named(name):
                return ctx
        if len(self) == 1 or not isinstance(name, str | None):
            return self.first
        names = ", ".join(ctx.model.name for ctx in self.listed())
        if not name:
            raise bad_parameter("model", f"is missing; this server has {names}", "missing_required_parameter")
        for ctx in self:
            if ctx.model.is_named(name):
                return ctx
        closest = max(self, key=lambda ctx: ctx.model.alias_length(name))
        if closest.model.alias_length(name):
            return closest
        raise ApiError(
            404, f"the model {show(name)} does not exist here; this server has {names}",
            code="model_not_found", param="model",
        )  # fmt: skip

    def of_body(self, fields: dict[str, Any]) -> ModelContext:
        """Return the context of the model that a decoded body names; raises ApiError. Ollama also has it in `name`, and
        llama.cpp's clients choose adapters by `lora`, which is removed."""
        ctx = self.find(fields.get("model") or fields.get("name"))
        if fields.get("lora") is None or not (ctx.model.adapters or ctx.adapter):
            return ctx
        chosen = _chosen(fields.pop("lora"), ctx)
        if chosen is not ctx:  # the name is that of the adapter's model
            fields.pop("model", None), fields.pop("name", None)
        return chosen


def _chosen(lora: object, ctx: ModelContext) -> ModelContext:
    """Return the context of the adapter in llama.cpp's list of ids and scales; raises ApiError."""
    adapters = ctx.model.adapters
    if ctx.adapter:
        raise bad_parameter("lora", f"is beside model {show(ctx.adapter)}, an adapter; send one of the two")
    if not isinstance(lora, list):
        raise bad_parameter("lora", f"{show(lora)} is not a list of adapters such as {{id: 0, scale: 1}}")
    wanted = [one for i, item in enumerate(lora) if (one := convert(_LoraScale, item, f"lora[{i}]")).scale]
    if len(wanted) > 1:
        raise bad_parameter("lora", "has several adapters with a scale that is not 0; a request has one at most")
    if not wanted:
        return ctx
    [one] = wanted
    if not 0 <= one.id < len(adapters):
        raise bad_parameter("lora", f"has the id {one.id}; GET /lora-adapters lists those that exist")
    card = adapters[one.id]
    if one.scale != card.scale:
        why = f"has the scale {one.scale:g}; that of {card.name} is {card.scale:g}, as the server is configured"
        raise bad_parameter("lora", why)
    return ctx.of_adapter(card)
