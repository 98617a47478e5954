"""Reranking as Jina and Cohere have it, and llama.cpp's server and vLLM: how relevant documents are to a query."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from lucevisor.api.app_state import METRICS, context_of, model_of
from lucevisor.api.bodies import prepare_request
from lucevisor.api.contexts import ModelContext
from lucevisor.api.decisions import Decider
from lucevisor.api.dialects.openai_embeddings import answer
from lucevisor.api.errors import bad_parameter
from lucevisor.api.parameters import check_length, check_model, check_ranks, yes_no_tokens
from lucevisor.api.pooling import check_count, check_text, pool_texts
from lucevisor.api.prepared import GenerationOptions, PreparedRequest, RerankOptions
from lucevisor.api.schemas import Flag, ParameterRules, ignored, to_record
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.tokenizer import Segment

PATHS: Final = ("/v1/rerank", "/v2/rerank", "/rerank", "/reranking", "/v1/reranking")
"""Jina's and Cohere's, and llama.cpp's."""
TEMPLATE_KEY: Final = "tokenizer.chat_template.rerank"
QWEN3_TEMPLATE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt that Qwen3's rerankers were trained with, for a causal model whose file has no template of its own."""


class Document(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank.  `texts` is another name of `documents`."""

    model: str | None = None
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: Flag = None


RULES: Final = ParameterRules(aliases={"texts": "documents", "return_text": "return_documents"})  # TEI's


def parse_rerank(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Rank documents by their relevance to a query."""
    body = to_record(RerankBody, fields, RULES)
    check_model(body.model, ctx)
    check_ranks(ctx)
    check_count(len(body.documents), "documents")
    if not body.query:
        raise bad_parameter("query", "is empty; send a text")
    check_length(body.query, "query", ctx)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    texts = [_pair(body.query, text, f"documents[{i}]", ctx) for i, text in enumerate(documents)]
    returned = tuple(documents) if body.return_documents else ()
    options = GenerationOptions(
        sampling=SamplingParams(),
        turn_ends=[[] for _ in texts],
        rerank=RerankOptions(
            top_n=min(body.top_n or len(texts), len(texts)), documents=returned, yes_no=yes_no_tokens(ctx)
        ),
        ignored=ignored(RerankBody, fields, RULES),
    )
    return PreparedRequest(options, [*texts])


def _pair(query: str, document: str, where: str, ctx: ModelContext) -> list[int]:
    """Return the ids of a query and a document in one text; raises ApiError naming the document."""
    check_length(document, where, ctx)
    if ctx.pooling.bidirectional:
        ids = ctx.tokenizer.encode_pair(query, document)
    else:
        template = str(ctx.model.facts.get(TEMPLATE_KEY, QWEN3_TEMPLATE))
        before, _, rest = template.partition("{query}")
        between, _, behind = rest.partition("{document}")
        texts = ((before, True), (query, False), (between, True), (document, False), (behind, True))
        ids = ctx.tokenizer.encode_segments([Segment(text, trusted) for text, trusted in texts])
    return check_text(ids, where, ctx)


async def create_rerank(request: web.Request) -> web.Response:
    """Rank documents by their relevance to a query."""
    prepared = await prepare_request(request, parse_rerank)
    assert isinstance(prepared, PreparedRequest)
    ctx, options = model_of(request), prepared.options.rerank
    assert options is not None
    metrics = request.app[METRICS].of_model(ctx.model.name)
    context, prompts = context_of(request), prepared.prompts
    if options.yes_no:
        answers = [options.yes_no] * len(prompts)
        decisions = await Decider(ctx, context, metrics, publishes=False).decide(prompts, answers)
        margins = [one.logprobs[0] - one.logprobs[1] for one in decisions]
    else:
        margins = [one[0] for one in await pool_texts(ctx, context, metrics, prompts, "documents")]
    scores = [1 / (1 + math.exp(-max(-700.0, margin))) for margin in margins]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: options.top_n]
    results: list[dict[str, object]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    for result, i in zip(results, order, strict=True):
        if options.documents:
            result["document"] = {"text": options.documents[i]}
    n_tokens = sum(map(len, prepared.prompts))
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    body = {"model": ctx.model.name, "object": "list", "usage": usage, "results": results}
    return answer(msgspec.json.encode(body), prepared)
