"""Checks that the endpoints share: model, options, prompt length, number of choices.

Knows no endpoint.  Invariant: a prompt that cannot fit the context is refused before it reaches the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.prompts.schemas import MAX_CHOICES, GenerationBody
from lucevisor.errors import show

_QUICK_CHARS: Final = 16 * 1024
"""Texts up to this length are always tokenised, in a few milliseconds."""


def check_model(name: str | None, ports: Ports) -> None:
    """Raise a 404 unless the requested model is the served one, as None and Ollama's name of it are."""
    if name not in (None, ports.model.name, ports.model.tagged):
        raise ApiError(
            404,
            f"the model {show(name)} does not exist here; this server has {show(ports.model.name)}",
            code="model_not_found",
            param="model",
        )


def check_common(body: GenerationBody, ports: Ports) -> None:
    """Check the model and combinations of parameters; raises ApiError naming the parameter at fault."""
    check_model(body.model, ports)
    if body.stream_options is not None and not body.stream:
        raise bad_parameter("stream_options", "is given without stream; send stream: true or leave it out")


def check_length(text: str, param: str, ports: Ports) -> None:
    """Reject a text that cannot fit the context by its bytes, before it is tokenised."""
    limit = ports.max_prompt
    if limit <= 0 or len(text) < max(limit, _QUICK_CHARS):
        return
    least = ports.tokenizer.bound.least_tokens(text)
    if least >= limit:
        raise _overflow(f"has at least {least} tokens", param, limit)


def check_ids(ids: Sequence[int], param: str, ports: Ports) -> Sequence[int]:
    """Return token ids; raises ApiError for one that is none of the vocabulary's."""
    n_vocab = ports.tokenizer.n_vocab
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < n_vocab:
            raise bad_parameter(f"{param}[{index}]", f"{token_id} is not a token id; use 0 to {n_vocab - 1}")
    return ids


def check_tokens(n_tokens: int, param: str, ports: Ports) -> None:
    """Reject a prompt with more tokens than the context holds."""
    if 0 < ports.max_prompt <= n_tokens:
        raise _overflow(f"has {n_tokens} tokens", param, ports.max_prompt)


def _overflow(what: str, param: str, max_context: int) -> ApiError:
    return ApiError(
        400,
        # Agents read the two numbers, with ">" between them, from what follows "prompt is too long".
        f"{param}: the prompt {what} > {max_context - 1} that fit: max_context is {max_context}, and one generated "
        f"token must fit too; shorten the prompt to at most {max_context - 1} tokens, or raise engine.max_context",
        code="context_length_exceeded",
        param=param,
    )


def limit_of(n_tokens: int | None) -> int | None:
    """Return the tokens that an answer may have; None, as -1 in a request: up to the end of the context."""
    return None if n_tokens == -1 else n_tokens


def check_least(body: GenerationBody, most: int | None) -> int:
    """Return the tokens that an answer must have; raises ApiError when they are more than it may have."""
    least = body.min_tokens or 0
    if most is not None and least > most:
        raise bad_parameter("min_tokens", f"{least} is more than max_tokens = {most}; send less")
    return least


def check_stop_ids(body: GenerationBody, ports: Ports) -> tuple[int, ...]:
    """Return the ids that end the answer; raises ApiError for one that is not a token."""
    return tuple(check_ids(body.stop_token_ids or (), "stop_token_ids", ports))


def check_choices(n: int | None, n_prompts: int) -> int:
    """Return the number of choices per prompt; raises ApiError when there are too many in all."""
    n = n or 1
    if n * n_prompts > MAX_CHOICES:
        raise bad_parameter("n", f"{n} choices of {n_prompts} prompts are more than {MAX_CHOICES}; request fewer")
    return n
