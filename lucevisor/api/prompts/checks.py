"""Checks that the endpoints share: model, options, prompt length, number of choices.

Knows no endpoint.  Invariant: a prompt that cannot fit the context is refused before it reaches the engine.
"""

from __future__ import annotations

from typing import Final

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.prompts.schemas import MAX_CHOICES, GenerationBody
from lucevisor.errors import show

_QUICK_CHARS: Final = 16 * 1024
"""Texts up to this length are tokenised, whatever the context, in a few milliseconds."""


def check_model(asked: str | None, ports: Ports) -> None:
    """Raise the 404 unless the model asked for is the one that is served; none asked is that one."""
    if asked is not None and asked != ports.model.name:
        raise ApiError(
            404,
            f"the model {show(asked)} does not exist here; this server has {show(ports.model.name)}",
            code="model_not_found",
            param="model",
        )


def check_common(body: GenerationBody, ports: Ports) -> None:
    """Check what no single field tells; ApiError naming the parameter."""
    check_model(body.model, ports)
    if body.stream_options is not None and not body.stream:
        raise bad_parameter("stream_options", "is given without stream; send stream: true or leave it out")


def check_length(text: str, param: str, ports: Ports) -> None:
    """Refuse by its bytes a text that cannot fit the context, before it is tokenised."""
    if ports.max_context <= 0 or len(text) < max(ports.max_context, _QUICK_CHARS):
        return
    least = ports.tokenizer.bound.least_tokens(text)
    if least >= ports.max_context:
        raise _overflow(f"has at least {least} tokens", param, ports.max_context)


def check_tokens(n_tokens: int, param: str, ports: Ports) -> None:
    """Refuse a prompt of more tokens than the context holds."""
    if 0 < ports.max_context <= n_tokens:
        raise _overflow(f"has {n_tokens} tokens", param, ports.max_context)


def _overflow(what: str, param: str, max_context: int) -> ApiError:
    return ApiError(
        400,
        f"{param}: the prompt {what} and one more must fit, but max_context is {max_context}; "
        f"shorten the prompt to at most {max_context - 1} tokens, or raise engine.max_context",
        code="context_length_exceeded",
        param=param,
    )


def check_choices(n: int | None, n_prompts: int) -> int:
    """Return the number of choices of each prompt; ApiError when there are too many in all."""
    n = n or 1
    if n * n_prompts > MAX_CHOICES:
        raise bad_parameter("n", f"{n} choices of {n_prompts} prompts are more than {MAX_CHOICES}; ask for fewer")
    return n
