"""Sampling parameters of a body, as the record for the output stage.

Pure except for random seeds.  Invariant: every value is in the range that the output stage accepts, and choice 0 of a
request samples exactly as the same request with n = 1.
"""

from __future__ import annotations

import secrets

from lucevisor.api.errors import bad_parameter
from lucevisor.api.ports import Ports, SamplingDefaults
from lucevisor.api.prompts.schemas import MAX_BIASES, GenerationBody
from lucevisor.errors import show
from lucevisor.protocol.steps import Sampling

_SEEDS = 2**63
_COLDEST = 1e-4
"""Lower temperatures count as 0 (greedy): the best token is certain, and dividing by them would overflow float32."""


def random_seed() -> int:
    """Return a seed for a request without one."""
    return secrets.randbits(63)


def sampling_params(body: GenerationBody, ports: Ports, seed: int, n_top_logprobs: int) -> Sampling:
    """Return the parameters of choice 0.  `seed`: used if the body has none; `n_top_logprobs` -1: no logprobs.

    Raises ApiError 400 for a logit_bias that is not about a token.
    """
    default: SamplingDefaults = ports.defaults
    temperature = _or(body.temperature, default.temperature)
    eos = ports.tokenizer.eos_ids if body.ignore_eos else frozenset()
    return Sampling(
        temperature=temperature if temperature >= _COLDEST else 0.0,
        top_k=max(0, int(_or(body.top_k, default.top_k))),
        top_p=_or(body.top_p, default.top_p),
        min_p=_or(body.min_p, default.min_p),
        seed=body.seed if body.seed is not None else seed,
        repetition_penalty=_or(body.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body, ports.tokenizer.n_vocab),
        n_top_logprobs=n_top_logprobs,
        banned=tuple(sorted({*ports.banned, *eos})),
    )


def seed_of_choice(seed: int, index: int) -> int:
    """Return the seed of choice `index`: distinct signed 64-bit integers, for choice 0 the request's."""
    return (seed + index + _SEEDS) % (2 * _SEEDS) - _SEEDS


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: GenerationBody, n_vocab: int) -> dict[int, float]:
    if len(body.logit_bias or ()) > MAX_BIASES:
        raise bad_parameter("logit_bias", f"has more than {MAX_BIASES} entries; send fewer")
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        # Decimal digits only: int() also accepts spaces, signs, underscores and digits of other scripts.
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) >= n_vocab:
            raise bad_parameter(f"logit_bias.{key[:40]}", f"{show(key)} is not a token id; use 0 to {n_vocab - 1}")
        bias[int(key)] = float(value)
    return bias
