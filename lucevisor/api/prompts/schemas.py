"""Schemas of the request bodies, and of parameters that are ignored or rejected.

Knows names, types and ranges, not what a value means.  Invariant: no parameter is dropped silently.  Parameters
without effect are in `HARMLESS`; those that would change the answer are in `REFUSED`, with the reason; unknown ones
have no effect either, as clients send new ones with every version.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 4096
MAX_BREAKERS = 16
MAX_BREAKER_CHARS = 40
MAX_CHOICES = 128
"""Choices of one request over all its prompts; each is a sequence of its own."""
MAX_ECHO_CHARS = 4 * 1024 * 1024
"""Characters of echoed prompts in one response, over all its choices."""
MAX_PROMPT_SCORES = 256 * 1024
"""Log-probabilities of echoed prompts in one response, over all its choices."""
MAX_TEXT_CHARS = 4 * 1024 * 1024
MAX_TEXT_TOKENS = 1024 * 1024
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Largest response of /tokenize and /detokenize, which the context does not limit."""
MAX_TOOL_VALUES = 32 * 1024
"""JSON values in all tools of a request, enough for the schemas of a thousand tools."""

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Limit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: none
Flag = bool | None
Fraction = Annotated[float, Meta(ge=0, le=1)]
OpenAiPenalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)] | bool
BreakerText = Annotated[str, Meta(min_length=1, max_length=MAX_BREAKER_CHARS)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]

ALIASES: Final[dict[str, str]] = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "thinking_budget_tokens": "max_thinking_tokens",
    "thinking_token_budget": "max_thinking_tokens",
}
"""llama.cpp's and vLLM's names of parameters."""

EFFORT_BUDGETS: Final[dict[str, int]] = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192, "high": 32768}
"""Tokens of thinking by effort, for chat templates that do not know effort; a higher one has no limit."""

HARMLESS: Final[dict[str, Any]] = {
    "cache_prompt": bool,
    "guided_decoding_backend": str,
    "guided_whitespace_pattern": str,
    "id_slot": int,
    "metadata": dict[str, Any],
    "prediction": dict[str, Any],
    "priority": int,
    "prompt_cache_key": str,
    "prompt_cache_options": dict[str, Any],
    "prompt_cache_retention": str,
    "reasoning_format": str,
    "safety_identifier": str,
    "service_tier": Literal["auto", "default", "flex", "scale", "priority"],
    "slot_id": int,
    "store": bool,
    "strict": bool,
    "timings_per_token": bool,
    "user": str,
    "verbosity": Literal["low", "medium", "high"],
}
"""Parameters that are accepted without effect, and their types: about accounts, storage and speed, or only a wish.

The response names them in a header.
"""

NOT_HERE: Final = "is not supported by this server; leave it out"

REFUSED: Final[dict[str, str]] = {
    "audio": "is not supported: this server answers with text only; leave it out",
    "allowed_token_ids": NOT_HERE,
    "bad_words": "is not supported; use logit_bias",
    "functions": "is deprecated and not supported; use tools",
    "messages": "is a parameter of /v1/chat/completions; send prompt, or use that path",
    "moderation": NOT_HERE,
    "prompt": "is a parameter of /v1/completions; send messages, or use that path",
    "suffix": "is a parameter of /v1/completions; use that path, or leave it out",
    "web_search_options": "is not supported: this server does not search the web; leave it out",
}
"""Known parameters that would change the answer and are not supported (null is accepted), or are another endpoint's."""

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "dynatemp_range": (0,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
}
"""Parameters accepted only with their neutral value."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: Flag = None
    continuous_usage_stats: Flag = None  # vLLM's: with every chunk
    include_obfuscation: Flag = None  # padding against traffic analysis: never sent


class JsonSchemaFormat(msgspec.Struct):
    """The schema of a response format.  `strict`: refuse keywords that cannot be enforced."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: Flag = None


class ResponseFormat(msgspec.Struct):
    """The requested response format; `schema` is llama.cpp's place for one."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of its forms."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Flag = None
    disable_any_whitespace: Flag = None
    disable_fallback: Flag = None
    whitespace_pattern: str | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters common to chat and plain completions.  None: absent, the default applies."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0: off
    min_p: Fraction | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: dict[str, Bias] | list[tuple[int | str, Bias]] | None = None  # the list: llama.cpp's
    presence_penalty: OpenAiPenalty | None = None
    frequency_penalty: OpenAiPenalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    typical_p: Fraction | None = None  # from here on as in llama.cpp
    top_n_sigma: Annotated[float, Meta(ge=-1, le=1000)] | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    dry_sequence_breakers: Annotated[list[BreakerText], Meta(max_length=MAX_BREAKERS)] | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] | None = None
    mirostat_eta: Fraction | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_tokens: Limit | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: Flag = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None  # llama.cpp's
    grammar: str | None = None  # llama.cpp's
    regex: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, given as one string or a list."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class NamedFunction(msgspec.Struct):
    """The function named by a tool_choice object."""

    name: str


class AllowedTools(msgspec.Struct):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoice(msgspec.Struct):
    """A tool_choice that names tools."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningObject(msgspec.Struct):
    """`reasoning` as routers and the Responses API write it."""

    effort: Effort | None = None
    enabled: Flag = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    exclude: Flag = None


class ThinkingObject(msgspec.Struct):
    """`thinking` as Anthropic, DeepSeek and GLM write it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions.  Messages and tools stay plain for the chat template; messages.py validates them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: Flag = None
    max_completion_tokens: Limit | None = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    enable_thinking: Flag = None
    reasoning_effort: Effort | None = None
    max_thinking_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: no limit
    reasoning: ReasoningObject | None = None
    thinking: ThinkingObject | None = None
    include_reasoning: Flag = None  # vLLM's
    add_generation_prompt: Flag = None  # from here on of the template
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: Flag = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize.  `content` and `prompt` are aliases."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
