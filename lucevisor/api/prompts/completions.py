"""The body of a completion request as options and token ids.

Invariant: prompts sent as token ids reach the engine unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lucevisor.api.errors import bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.api.prompts.checks import (
    check_choices,
    check_common,
    check_least,
    check_length,
    check_stop_ids,
    check_tokens,
    limit_of,
)
from lucevisor.api.prompts.constraint import output_grammar, requested_form
from lucevisor.api.prompts.decoding import OPENAI, ignored, to_record
from lucevisor.api.prompts.sampling import n_top_logprobs, random_seed, sampling_params
from lucevisor.api.prompts.schemas import MAX_ECHO_CHARS, MAX_PROMPT_SCORES, CompletionBody
from lucevisor.text.infill import InfillTokens, OtherFile
from lucevisor.text.tokenizer import Tokenizer

RULES: Final = replace(OPENAI, aliases={**OPENAI.aliases, "prompt_token_ids": "prompt"})


def read_completion(fields: dict[str, Any], ports: Ports) -> PreparedRequest:
    """Prepare the request in a decoded body; raises ApiError naming the parameter at fault."""
    body = to_record(CompletionBody, fields, RULES)
    check_common(body, ports)
    wanted = body.logprobs or None if isinstance(body.logprobs, bool) else body.logprobs
    n_top = n_top_logprobs(body, None if wanted is None else int(wanted), "logprobs")
    score_prompt = bool(body.echo) and n_top >= 0
    if score_prompt and body.stream:
        raise bad_parameter(
            "stream", "true is not available with echo and logprobs; leave one of them out", "unsupported_value"
        )
    n = check_choices(body.n, count_prompts(body.prompt))
    prompts = _read_gap(body, ports) if body.suffix else read_prompts(body.prompt, ports)
    if score_prompt:
        _check_scores(prompts, n, n_top)
    grammar, prompt_only = output_grammar(requested_form(body), ports), body.max_tokens == 0
    options = GenerationOptions(
        sampling=sampling_params(body, ports, random_seed(), n_top, structured=grammar is not None),
        turn_ends=[[] for _ in prompts],
        max_tokens=1 if prompt_only else limit_of(body.max_tokens),
        min_tokens=0 if prompt_only else check_least(body, limit_of(body.max_tokens)),
        prompt_only=prompt_only,
        n=n,
        ignore_eos=bool(body.ignore_eos),
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        stop_ids=check_stop_ids(body, ports),
        ignored=ignored(CompletionBody, fields, RULES),
        grammar=grammar,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=n_top >= 0,
        echoes=_echoes(prompts, n, ports.tokenizer) if body.echo else (),
        score_prompt=score_prompt,
    )
    return PreparedRequest(options, [tuple(prompt.ids) for prompt in prompts])


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is None if it was sent as token ids."""

    ids: list[int]
    text: str | None = None


def _echoes(prompts: list[Prompt], n: int, tokenizer: Tokenizer) -> tuple[str, ...]:
    echoes = tuple(tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text for prompt in prompts)
    n_chars = n * sum(map(len, echoes))
    if n_chars > MAX_ECHO_CHARS:
        raise bad_parameter(
            "echo",
            f"would repeat {n_chars} characters, more than {MAX_ECHO_CHARS}; leave it out or request fewer choices",
        )
    return echoes


def _check_scores(prompts: list[Prompt], n: int, n_top: int) -> None:
    n_scores = n * (1 + n_top) * sum(len(prompt.ids) for prompt in prompts)
    if n_scores > MAX_PROMPT_SCORES:
        reason = (
            f"of the prompts would be {n_scores}, more than {MAX_PROMPT_SCORES}; request fewer, or of fewer choices"
        )
        raise bad_parameter("logprobs", reason)


def count_prompts(prompt: str | list[str | int | list[int]]) -> int:
    """Return the number of prompts."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def read_prompts(prompt: str | list[str | int | list[int]], ports: Ports) -> list[Prompt]:
    """Return the prompts: a text, several, a list of ids, or several of those."""
    if isinstance(prompt, str):
        return [_from_text(prompt, "prompt", ports)]
    if not prompt:
        raise bad_parameter("prompt", "is an empty array; send text or token ids")
    if isinstance(prompt[0], int):
        return [_from_ids(prompt, "prompt", ports)]
    prompts = []
    for index, item in enumerate(prompt):
        where = f"prompt[{index}]"
        if isinstance(item, int):
            raise bad_parameter(where, "is a token id beside prompts; send ids of one prompt in an array of their own")
        prompts.append(_from_text(item, where, ports) if isinstance(item, str) else _from_ids(item, where, ports))
    return prompts


def _read_gap(body: CompletionBody, ports: Ports) -> list[Prompt]:
    """Return the prompt for the gap between `prompt` and `suffix`; an echo is of `prompt` alone."""
    if not isinstance(body.prompt, str):
        raise bad_parameter("suffix", "is the end of one text; send prompt as one text, or leave suffix out")
    if body.echo and body.logprobs:
        raise bad_parameter("logprobs", "is not available with echo and suffix; leave one of them out")
    ids = infill_ids(body.prompt, body.suffix or "", (), "suffix", ports)
    check_tokens(len(ids), "prompt", ports)
    return [Prompt(ids, body.prompt)]


def infill_ids(before: str, after: str, files: Sequence[OtherFile], param: str, ports: Ports) -> list[int]:
    """Return the prompt for a gap; raises ApiError naming `param` if the vocabulary has no tokens for that."""
    tokens = InfillTokens.of(ports.tokenizer)
    if tokens is None:
        raise bad_parameter(
            param, "the model's vocabulary has no fill-in-the-middle tokens; serve a model that has", "no_infill"
        )
    for text in (before, after, *(file.text for file in files)):
        check_length(text, param, ports)
    return tokens.prompt(before, after, files, ports.tokenizer)


def _from_text(text: str, where: str, ports: Ports) -> Prompt:
    check_length(text, where, ports)
    ids = ports.tokenizer.encode_prompt(text)
    if not ids:
        raise bad_parameter(where, "is empty; the model needs at least one token to continue")
    check_tokens(len(ids), where, ports)
    return Prompt(ids, text)


def _from_ids(ids: object, where: str, ports: Ports) -> Prompt:
    if not isinstance(ids, list) or not ids:
        raise bad_parameter(where, "is empty; the model needs at least one token to continue")
    checked: list[int] = []
    n_vocab = ports.tokenizer.n_vocab
    for index, token_id in enumerate(ids):
        if not isinstance(token_id, int):
            raise bad_parameter(f"{where}[{index}]", "is not a token id; send only texts or only arrays of token ids")
        if not 0 <= token_id < n_vocab:
            raise bad_parameter(f"{where}[{index}]", f"{token_id} is not a token id; use 0 to {n_vocab - 1}")
        checked.append(token_id)
    check_tokens(len(checked), where, ports)
    return Prompt(checked)
