"""Sampler parameters and checks that the endpoints share.  The samplers themselves run in the output stage's daemon.

Choice 0 of a request samples exactly as the same request with n = 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from lucevisor.api.contexts import ModelContext, SamplingDefaults
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.schemas import EFFORT_BUDGETS, MAX_BIASES, MAX_CHOICES, GenerationBody
from lucevisor.errors import show
from lucevisor.protocol.steps import Dry, Mirostat, SamplingParams
from lucevisor.text.tokenizer import Tokenizer, TooManyTokens, breaker_tokens

_Input = TypeVar("_Input")


def check_model(name: str | None, ctx: ModelContext) -> None:
    """Raise a 404 unless the requested model is the served one, as None, Ollama's name of it and its aliases are."""
    if name is not None and not (ctx.model.is_named(name) or ctx.model.alias_length(name)):
        raise ApiError(
            404,
            f"the model {show(name)} does not exist here; this server has "
            + ", ".join(show(card.name) for card in (ctx.model, *ctx.model.adapters)),
            code="model_not_found",
            param="model",
        )


def check_generates(ctx: ModelContext) -> None:
    """Raise a 400 if the model cannot generate."""
    if not ctx.pooling.generates:
        what, path = ("ranks texts", "/v1/rerank") if ctx.pooling.ranks else ("makes embeddings", "/v1/embeddings")
        raise _wrong_model(ctx, f"only {what}; use {path}, or a model that generates")


def check_embeds(ctx: ModelContext) -> None:
    """Raise a 400 if the model makes no embeddings."""
    if ctx.pooling.ranks:
        raise _wrong_model(ctx, "only ranks texts; use /v1/rerank, or a model that makes embeddings")


def yes_no_tokens(ctx: ModelContext) -> tuple[tuple[int, ...], ...]:
    """Return the answers by which a model with Qwen's markers judges documents, as a Qwen3 reranker does; none for
    others."""
    if not ctx.pooling.generates or ctx.tokenizer.token_id("<|im_start|>") is None:
        return ()
    return tuple(tuple(ctx.tokenizer.encode(word)) for word in ("yes", "no"))


def check_ranks(ctx: ModelContext) -> None:
    """Raise a 400 if the model does not rank texts."""
    if not ctx.pooling.ranks and not yes_no_tokens(ctx):
        raise _wrong_model(ctx, "does not rank texts; serve a reranker, whose file says pooling_type 4 (rank)")


def _wrong_model(ctx: ModelContext, why: str) -> ApiError:
    return bad_parameter("model", f"{show(ctx.model.name)} {why}", "unsupported_model")


def check_common(body: GenerationBody, ctx: ModelContext) -> None:
    """Check the model and combinations of parameters; raises ApiError naming the parameter at fault."""
    check_model(body.model, ctx)
    if body.stream_options is not None and not body.stream:
        raise bad_parameter("stream_options", "is given without stream; send stream: true or leave it out")


def check_length(text: str, param: str, ctx: ModelContext) -> None:
    """Reject a text that cannot fit the context by its bytes, before it is tokenised."""
    limit = ctx.max_prompt
    if limit <= 0 or len(text) < max(limit, 16 * 1024):  # a few milliseconds
        return
    least = ctx.tokenizer.min_tokens(text)
    if least >= limit:
        raise _overflow(f"has at least {least} tokens", param, limit)


def check_token_ids(ids: Sequence[int], param: str, ctx: ModelContext) -> Sequence[int]:
    n_vocab = ctx.tokenizer.n_vocab
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < n_vocab:
            raise bad_parameter(f"{param}[{index}]", f"{token_id} is not a token id; use 0 to {n_vocab - 1}")
    return ids


def read_inputs(
    given: str | list[str | int | list[int]],
    param: str,
    of_text: Callable[[str, str], _Input],
    of_ids: Callable[[list[int], str], _Input],
    noun: str = "text",
) -> list[_Input]:
    """Read a text, the ids of one, or a list of texts and ids, each with its place; raises ApiError."""
    if isinstance(given, str):
        return [of_text(given, param)]
    items: list[tuple[object, str]] = [(item, f"{param}[{index}]") for index, item in enumerate(given)]
    found = []
    for item, where in [(given, param)] if given and isinstance(given[0], int) else items:
        if isinstance(item, str):
            found.append(of_text(item, where))
            continue
        if not isinstance(item, list):
            why = f"is a token id beside {noun}s; send ids of one {noun} in an array of their own"
            raise bad_parameter(where, why)
        for index, token_id in enumerate(item):
            if not isinstance(token_id, int):
                why = "is not a token id; send only texts or only arrays of token ids"
                raise bad_parameter(f"{where}[{index}]", why)
        found.append(of_ids(item, where))
    return found


def check_tokens(n_tokens: int, param: str, ctx: ModelContext) -> None:
    if 0 < ctx.max_prompt <= n_tokens:
        raise _overflow(f"has {n_tokens} tokens", param, ctx.max_prompt)


def _overflow(what: str, param: str, max_context: int) -> ApiError:
    return ApiError(
        400,
        # Agents parse the two numbers, with ">" between them, after "prompt is too long".
        f"{param}: the prompt {what} > {max_context - 1} that fit: max_context is {max_context}, and one generated "
        f"token must fit too; shorten the prompt to at most {max_context - 1} tokens, or raise engine.max_context",
        code="context_length_exceeded",
        param=param,
    )


def common_options(body: GenerationBody, ctx: ModelContext, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that chat and plain completions share; `names`: parameters without effect."""
    stream = body.stream_options
    return {
        "ignore_eos": bool(body.ignore_eos),
        "stops": body.stops,
        "include_stop": bool(body.include_stop_str_in_output),
        "stop_ids": tuple(check_token_ids(body.stop_token_ids or (), "stop_token_ids", ctx)),
        "ignored": names,
        "stream": bool(body.stream),
        "include_usage": bool(stream and stream.include_usage),
        "continuous_usage": bool(stream and stream.continuous_usage_stats),
        "token_ids": bool(body.return_token_ids),
    }


def max_tokens_of(n_tokens: int | None) -> int | None:
    """Return the tokens that an answer may have; None, as -1 in a request: up to the end of the context."""
    return None if n_tokens == -1 else n_tokens


def check_min_tokens(body: GenerationBody, most: int | None) -> int:
    """Return the tokens that an answer must have; raises ApiError when they are more than it may have."""
    least = body.min_tokens or 0
    if most is not None and least > most:
        raise bad_parameter("min_tokens", f"{least} is more than max_tokens = {most}; send less")
    return least


def check_choices(n: int | None, n_prompts: int) -> int:
    """Return the number of choices per prompt; raises ApiError when there are too many in all."""
    n = n or 1
    if n * n_prompts > MAX_CHOICES:
        raise bad_parameter("n", f"{n} choices of {n_prompts} prompts are more than {MAX_CHOICES}; request fewer")
    return n


BREAKERS: Final = ("\n", ":", '"', "*")
"""Default of dry_sequence_breakers, as in llama.cpp."""

_SHAPES: Final = frozenset(
    [
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "dry_multiplier", "mirostat"),
    ]
)
"""Parameters that shape the distribution a token is drawn from."""

_SEEDS = 2**63


def random_seed() -> int:
    return secrets.randbits(63)


def sampling_params(
    body: GenerationBody,
    ctx: ModelContext,
    seed: int,
    n_top_logprobs: int,
    *,
    direct: bool = False,
    structured: bool = False,
) -> SamplingParams:
    """Return the parameters of choice 0. `seed`: used if the body has none; `n_top_logprobs` -1: no logprobs; `direct`:
    the prompt leaves no room for thinking; `structured`: the answer has a grammar or may call tools. Raises ApiError
    400."""
    default = _defaults(body, ctx, direct=direct, structured=structured)
    temperature = _or(body.temperature, default.temperature)
    eos = ctx.tokenizer.eos_ids if body.ignore_eos else frozenset()
    return SamplingParams(
        # Lower ones count as 0, as dividing by them would overflow float32.
        temperature=temperature if temperature >= 1e-4 else 0.0,
        top_k=max(0, int(_or(body.top_k, default.top_k))),
        top_p=_or(body.top_p, default.top_p),
        min_p=_or(body.min_p, default.min_p),
        seed=seed if body.seed in (None, -1) else body.seed,  # -1: as in llama.cpp
        repetition_penalty=_or(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, default.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body, ctx.tokenizer),
        n_top_logprobs=n_top_logprobs,
        banned=tuple(sorted({*ctx.banned, *eos})),
        typical_p=_or(body.typical_p, 1.0),
        top_n_sigma=max(0.0, _or(body.top_n_sigma, 0.0)),
        xtc_probability=_or(body.xtc_probability, 0.0),
        xtc_threshold=_or(body.xtc_threshold, 0.1),
        dry=_dry(body, ctx.tokenizer),
        mirostat=Mirostat(body.mirostat, _or(body.mirostat_tau, 5.0), _or(body.mirostat_eta, 0.1))
        if body.mirostat
        else None,
    )


def _defaults(body: GenerationBody, ctx: ModelContext, *, direct: bool, structured: bool) -> SamplingDefaults:
    """Return the defaults for sampling parameters that the body does not set. A family's penalties are tuned for its
    own temperature and for prose: they go with the whole set or not at all."""
    default = (direct and ctx.direct_defaults) or ctx.defaults
    if structured or any(getattr(body, name) is not None for name in _SHAPES):
        plain = SamplingDefaults()
        return replace(default, repetition_penalty=plain.repetition_penalty, presence_penalty=plain.presence_penalty)
    return default


def searches_vocabulary(fields: dict[str, Any]) -> bool:
    """Return whether reading the body visits every token, which takes too long for the event loop."""
    return bool(fields.get("dry_multiplier"))


def n_top_logprobs(body: GenerationBody, requested: int | None, name: str) -> int:
    """Return how many log-probabilities to return with each token, by the parameter `name` or llama.cpp's; -1: none."""
    if not body.n_probs:
        return -1 if requested is None else requested
    if requested is not None and requested != body.n_probs:
        raise bad_parameter("n_probs", f"{body.n_probs} contradicts {name} = {requested}; send one of them")
    return body.n_probs


def _dry(body: GenerationBody, tokenizer: Tokenizer) -> Dry | None:
    if not body.dry_multiplier or body.dry_penalty_last_n == 0:
        return None
    texts = BREAKERS if body.dry_sequence_breakers is None else tuple(body.dry_sequence_breakers)
    try:
        breakers = breaker_tokens(tokenizer, texts)
    except TooManyTokens as error:
        raise bad_parameter("dry_sequence_breakers", f"{error}; leave it out") from None
    return Dry(
        multiplier=body.dry_multiplier,
        base=_or(body.dry_base, 1.75),
        allowed_length=2 if body.dry_allowed_length is None else body.dry_allowed_length,
        last_n=-1 if body.dry_penalty_last_n is None else body.dry_penalty_last_n,
        breakers=breakers,
    )


def budget_of(effort: str, ctx: ModelContext) -> int | None:
    return ctx.efforts.get(effort, EFFORT_BUDGETS.get(effort))


def seed_of_choice(seed: int, index: int) -> int:
    """Return the seed of choice `index`: distinct signed 64-bit integers, for choice 0 the request's."""
    return (seed + index + _SEEDS) % (2 * _SEEDS) - _SEEDS


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: GenerationBody, tokenizer: Tokenizer) -> dict[int, float]:
    """Return the biases by token.  llama.cpp's list may name a text, for all its tokens, and false bans a token."""
    given = body.logit_bias or {}
    if len(given) > MAX_BIASES:
        raise bad_parameter("logit_bias", f"has more than {MAX_BIASES} entries; send fewer")
    listed = isinstance(given, list)
    bias: dict[int, float] = {}
    for index, (key, value) in enumerate(given if isinstance(given, list) else given.items()):
        where = f"logit_bias[{index}]" if listed else f"logit_bias.{str(key)[:40]}"
        if value is True:
            raise bad_parameter(where, "true is not a bias; send a number, or false to ban the token")
        for token in _biased(key, tokenizer, where, texts=listed):
            bias[token] = -100.0 if value is False else float(value)
    return bias


def _biased(key: int | str, tokenizer: Tokenizer, where: str, *, texts: bool) -> Sequence[int]:
    # Decimal digits only: int() also accepts spaces, signs, underscores and digits of other scripts.
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        key = int(key)
    if isinstance(key, str) and texts:
        return tokenizer.encode(key)
    if isinstance(key, str) or not 0 <= key < tokenizer.n_vocab:
        raise bad_parameter(where, f"{show(key)} is not a token id; use 0 to {tokenizer.n_vocab - 1}")
    return [key]
