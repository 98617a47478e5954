"""A parsed and validated request, in plain values that can cross process boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from lucevisor.compression.compressor import CompressedPrompt
from lucevisor.engine.request import PromptImage
from lucevisor.model.vision import EncoderImage
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.grammar.matcher import Grammar


class OutputGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of the whole output in llguidance's notation, and the parameter it comes from."""

    grammar: str
    param: str


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Responses API. ``echo``: JSON object of the request's fields that the response repeats. ``items``:
    JSON array of the request's own input items. ``summary``: send reasoning as its summary. ``encrypted``: send it
    encoded too. ``namespaces``: of functions, by the name in the prompt. ``custom``: names of tools whose input is
    text."""

    echo: bytes
    items: bytes
    previous_id: str | None
    store: bool
    summary: bool
    encrypted: bool
    namespaces: dict[str, str]
    custom: list[str]


class EmbeddingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of embeddings.  ``dimensions``: the first so many numbers; None: all.  ``normalize``: to length 1."""

    dimensions: int | None = None
    normalize: bool = True
    base64: bool = False


class RerankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a ranking. ``documents``: to be returned with the results. ``yes_no``: the tokens of the answers of a
    model that generates; empty: the model scores."""

    top_n: int
    yes_no: tuple[tuple[int, ...], ...] = ()
    documents: tuple[str, ...] = ()


class DecisionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``answers``: the ids of the answers of each prompt. ``labels``: of the only prompt, or ``questions``: name, type,
    and the options' keys and texts of each."""

    answers: list[list[list[int]]]
    labels: list[str | int | float] = []
    questions: list[tuple[str, str, list[str], list[str]]] = []


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a generation request, or of one for an ``embedding``, a ``rerank`` or a ``decision``.

    ``turn_ends``: offsets of complete chat messages, per prompt; ``roles``: of the messages, per prompt, empty for raw
    ones.  ``max_tokens`` None: up to the end of the context; ``min_tokens``: nothing ends the answer before;
    ``prompt_only``: there is none.  ``stop_ids``: tokens that end the answer besides the model's own;
    ``include_stop``: a stop string is part of the text.  ``ignored``: names of parameters without effect.
    ``grammar``: what the output must be.  ``max_thinking_tokens`` None: no limit of its own.  ``continuous_usage``:
    usage comes with every chunk of a stream.  ``custom``: names of tools whose input is text.  ``show_reasoning``: the
    client wants its text.  ``echoes``: the text of each prompt if it is to be repeated, else empty.
    ``prompt_logprobs``: log-probabilities of the prompt's tokens are wanted, too.  ``plain``: all text is content.
    ``keep_alive_s``: idle time after which the model is unloaded from now on; negative: never, None: as before.
    """

    sampling: SamplingParams
    turn_ends: list[list[int]]
    max_tokens: int | None = None
    n: int = 1
    min_tokens: int = 0
    prompt_only: bool = False
    ignore_eos: bool = False
    include_stop: bool = False
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()
    grammar: OutputGrammar | None = None
    max_thinking_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    logprobs: bool = False
    tools: list[dict[str, Any]] = []
    custom: list[str] = []
    reasoning_open: bool = False
    show_reasoning: bool = True
    one_tool_call: bool = False
    roles: list[list[str]] = []
    echoes: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    plain: bool = False
    embedding: EmbeddingOptions | None = None
    keep_alive_s: float | None = None
    rerank: RerankOptions | None = None
    decision: DecisionOptions | None = None
    response: ResponseOptions | None = None

    @property
    def pooled(self) -> bool:
        """True if nothing is generated."""
        return self.embedding is not None or self.rerank is not None or self.decision is not None


CUSTOM_INPUT: Final = "input"
"""Name of the only parameter of the function that stands for a custom tool in the prompt."""


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool's function; all of them if the model wrote others."""
    try:
        fields = msgspec.json.decode(arguments, type=dict[str, str])
    except ValueError:  # other types, or JSON that msgspec refuses: long numbers, half a surrogate pair
        return arguments
    return fields[CUSTOM_INPUT] if fields.keys() == {CUSTOM_INPUT} else arguments


STORED_RESPONSES: Final = "stored_responses"
"""Member that the server adds to a body of the Responses API: items of earlier responses, by their ids."""


@dataclass(frozen=True, slots=True)
class ModelLoadRequest:
    """A request that loads a model, or unloads it with ``keep_alive_s`` 0; ``answer``: the response."""

    answer: bytes
    keep_alive_s: float | None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request with the token ids of its prompts. ``compressed``: what PFlash made of them; empty while it is off.
    ``images``: of the only prompt, with where they start; ``embedded``: the same with their embedding rows."""

    options: GenerationOptions
    prompts: list[Sequence[int]]
    grammar: Grammar | None = None
    compressed: tuple[CompressedPrompt, ...] = ()
    images: tuple[tuple[int, EncoderImage], ...] = ()
    embedded: tuple[PromptImage, ...] = ()

    def with_options(self, **changes: Any) -> PreparedRequest:
        return replace(self, options=msgspec.structs.replace(self.options, **changes))
