"""200 JSON schemas, a random and a trained model: every answer is valid, and drafts change none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

from lucevisor.deployment.service import Service
from lucevisor.engine.request import FinishedEvent, GenerationRequest, TokenEvent
from lucevisor.model.families import open_spec
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.grammar import forms
from lucevisor.text.grammar.matcher import GrammarCompiler
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.tokenizer import Tokenizer
from tests.e2e.schemas import WRITTEN, Schema, schemas
from tests.e2e.service import DEMO, GOLDEN, running, write_config
from tests.text.vocabularies import CONTROL, byte_metadata, demo_metadata

ENGINE = '[engine]\ndtype = "float32"\nmax_sequences = 8\npages = 400\n'
DRAFTER = DEMO.parent / "demo-qwen35-22m-dflash2-q4_0.gguf"
MODELS = {"random": GOLDEN / "qwen35" / "model.gguf", "demo": DEMO}
DRAFTS = {"random": '[draft]\nkind = "lookup"\nwidth = 3\n', "demo": f'[draft]\nkind = "dflash"\npath = "{DRAFTER}"\n'}
MOST_TOKENS = 500
# What ends strings, lists, times, recursion (null) and answers: a model that goes on gives a beginning only.
BIAS = {
    "random": {'"': 1.0, "}": 1.0, "]": 1.0, "": 1.0},
    "demo": {'"': 14.0, "}": 8.0, "]": 8.0, "Z": 6.0, "null": 13.0, "": 10.0},
}
NULL = (b"n", b"nu", b"nul", b"null")
FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4", "email"])  # `time` of the library is not RFC 3339's


def tokenizer_of(model: str) -> Tokenizer:
    """The demo's own; the random model has none, so its ids stand for bytes."""
    return Tokenizer.from_gguf(demo_metadata() if model == "demo" else byte_metadata("qwen2", {"<|im_end|>": CONTROL}))


async def answers(
    service: Service, words: Tokenizer, wanted: list[Schema], model: str
) -> list[tuple[list[int], FinishedEvent]]:
    """Tokens and end of an answer by each schema, all at once.  The bias makes models close what they open."""
    assert service.only.engine is not None
    compiler = GrammarCompiler(words)
    texts = [words.token_bytes(i) for i in range(words.n_vocab)]
    ends = ["null" if text.strip() in NULL else text[:1].decode("latin-1") for text in texts]
    bias = {i: BIAS[model][end] for i, end in enumerate(ends) if end in BIAS[model]}
    bias |= dict.fromkeys(words.eos_ids, BIAS[model][""])
    handles = []
    for number, schema in enumerate(wanted):
        rules = Rules(words)
        grammar = compiler.compile(rules.grammar(rules.part(forms.json_schema(schema))))
        handles.append(
            service.only.engine.submit(
                GenerationRequest(
                    request_id=f"schema-{number}",
                    prompt=tuple(words.encode(f"Answer {number} as JSON: ")),
                    max_tokens=MOST_TOKENS,
                    sampling=SamplingParams(seed=number, logit_bias=bias),
                    stop_ids=words.eos_ids,
                    constraint=grammar.matcher(),
                )
            )
        )
    found = []
    for handle in handles:
        *tokens, end = [event async for event in handle]
        assert isinstance(end, FinishedEvent)
        found.append(([event.token for event in tokens if isinstance(event, TokenEvent)], end))
    return found


def check(model: str, wanted: list[Schema], directory: Path) -> None:
    words = tokenizer_of(model)

    async def both() -> list[list[tuple[list[int], FinishedEvent]]]:
        found = []
        for drafts in ('[draft]\nkind = "off"\n', DRAFTS[model]):
            n_layers = open_spec(MODELS[model]).n_layers
            config = write_config(directory, MODELS[model], {"a": 1}, [f"0-{n_layers}"], ENGINE + drafts)
            async with running(config, directory) as service:
                found.append(await answers(service, words, wanted, model))
                if drafts == DRAFTS[model]:
                    assert service.only.engine is not None
                    assert service.only.engine.statistics().drafts.n_accepted > 0
        return found

    plain, drafted = asyncio.run(both())
    unfinished = []
    for schema, (tokens, end), (others, _) in zip(wanted, plain, drafted, strict=True):
        assert others == tokens, schema
        if end.reason == "stop":
            jsonschema.validate(json.loads(words.decode(tokens)), schema, format_checker=FORMATS)
        else:
            unfinished.append((schema, words.decode(tokens)))
    assert not unfinished


def test_a_random_model_gives_valid_answers_with_and_without_drafts(tmp_path: Path) -> None:
    check("random", [WRITTEN[i] for i in (1, 3, 9, 12, 17, 30, 33, 43, 50, 52)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_200_schemas_with_and_without_drafts(model: str, tmp_path: Path) -> None:
    check(model, schemas(), tmp_path)
