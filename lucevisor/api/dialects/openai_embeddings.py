"""OpenAI's embeddings: of models made for them, and the last hidden state of any other."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from lucevisor.api.app_state import METRICS, context_of, model_of
from lucevisor.api.bodies import prepare_request
from lucevisor.api.contexts import ModelContext
from lucevisor.api.errors import bad_parameter
from lucevisor.api.generation import IGNORED_HEADER
from lucevisor.api.parameters import check_embeds, check_model, read_inputs
from lucevisor.api.pooling import check_count, check_text, embedding, pool_texts, text_ids
from lucevisor.api.prepared import EmbeddingOptions, GenerationOptions, PreparedRequest
from lucevisor.api.schemas import Flag, ParameterRules, ignored, to_record
from lucevisor.protocol.steps import SamplingParams

INLINE_NUMBERS: Final = 16 * 1024
"""Numbers of a response that are encoded on the event loop, in a few milliseconds."""


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: Flag = None  # vLLM's, as is the next one
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None


RULES: Final = ParameterRules(aliases={"content": "input"})  # llama.cpp's


def parse_embeddings(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Create embeddings of texts or token ids."""
    body = to_record(EmbeddingsBody, fields, RULES)
    check_model(body.model, ctx)
    options = EmbeddingOptions(
        dimensions=check_dimensions(body.dimensions, ctx),
        normalize=body.normalize is not False,
        base64=body.encoding_format == "base64",
    )
    if body.truncate_prompt_tokens == 0:
        raise bad_parameter("truncate_prompt_tokens", "0 leaves nothing of a text; send 1 or more, or -1")
    texts = read_texts(body.input, "input", ctx, max_tokens=body.truncate_prompt_tokens)
    return prepare_texts(texts, options, ctx, ignored(EmbeddingsBody, fields, RULES))


def check_dimensions(dimensions: int | None, ctx: ModelContext) -> int | None:
    if dimensions is not None and dimensions > ctx.pooled_width:
        raise bad_parameter(
            "dimensions", f"{dimensions} is more than the {ctx.pooled_width} of an embedding; send less"
        )
    return dimensions


def read_texts(
    given: str | list[str | int | list[int]], param: str, ctx: ModelContext, *, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the ids of each text, which may be ids already; raises ApiError naming the one at fault."""
    if not isinstance(given, str) and not (given and isinstance(given[0], int)):
        check_count(len(given), param)
    return read_inputs(
        given,
        param,
        lambda text, where: text_ids(text, where, ctx, max_tokens=max_tokens),
        lambda ids, where: check_text(ids, where, ctx),
    )


def prepare_texts(
    texts: Sequence[Sequence[int]], options: EmbeddingOptions, ctx: ModelContext, names: tuple[str, ...]
) -> PreparedRequest:
    """Return the request for embeddings of texts; `names`: of parameters without effect."""
    check_embeds(ctx)
    empty: list[list[int]] = [[] for _ in texts]
    options_ = GenerationOptions(sampling=SamplingParams(), turn_ends=empty, embedding=options, ignored=names)
    return PreparedRequest(options_, [*texts])


async def create_embeddings(request: web.Request) -> web.Response:
    """Create embeddings of texts or token ids."""
    prepared = await prepare_request(request, parse_embeddings)
    assert isinstance(prepared, PreparedRequest)
    ctx = model_of(request)
    vectors = await embeddings_of(request, prepared, "input")
    n_tokens = sum(map(len, prepared.prompts))
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    base64_ = prepared.options.embedding is not None and prepared.options.embedding.base64

    def encoded() -> bytes:
        shown = [base64.b64encode(one.tobytes()).decode() if base64_ else one.tolist() for one in vectors]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(shown)]
        return msgspec.json.encode({"object": "list", "data": data, "model": ctx.model.name, "usage": usage})

    body = encoded() if sum(map(len, vectors)) <= INLINE_NUMBERS else await asyncio.to_thread(encoded)
    return answer(body, prepared)


async def embeddings_of(request: web.Request, prepared: PreparedRequest, param: str) -> list[array[float]]:
    """Return the embeddings of a prepared request; `param`: the parameter that held its texts."""
    ctx, context, options = model_of(request), context_of(request), prepared.options.embedding
    assert options is not None
    metrics = request.app[METRICS].of_model(ctx.model.name)
    pooled = await pool_texts(ctx, context, metrics, prepared.prompts, param)
    if ctx.control is not None and prepared.options.keep_alive_s is not None:
        ctx.control.keep_alive(prepared.options.keep_alive_s)
    return [embedding(one, options) for one in pooled]


def answer(body: bytes, prepared: PreparedRequest) -> web.Response:
    names = prepared.options.ignored
    headers = {IGNORED_HEADER: ", ".join(names)} if names else {}
    return web.Response(body=body, content_type="application/json", headers=headers)
