"""The unmodified `openai` client against the demo model over its two daemons."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

ASK = [{"role": "user", "content": "What does len() do in Python?"}]
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def client(endpoint: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint, api_key="none", max_retries=0, timeout=60) as one:
        yield one


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def ids(choice: object) -> list[int]:
    return list(choice.model_extra["token_ids"])  # type: ignore[attr-defined]


def test_chat_and_its_stream_are_the_same(client, model):
    ask = {"model": model, "messages": ASK, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    stream = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
    )
    chunks = list(stream)
    assert whole.choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [i for c in chunks if c.choices for i in ids(c.choices[0])] == ids(whole.choices[0])
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(ids(whole.choices[0]))
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_length_and_stop(client, model):
    ask = {"model": model, "prompt": PROMPT, "temperature": 0}
    plain = client.completions.create(**ask, max_tokens=8, extra_body={"ignore_eos": True})
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage.completion_tokens == 8
    text = plain.choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(**ask, max_tokens=8, stop=[stop], extra_body={"ignore_eos": True})
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]


def test_seed_decides(client, model):
    ask = {"model": model, "prompt": PROMPT, "temperature": 1.5, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    first, again, other = (client.completions.create(**ask, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == again != other


def test_logit_bias_forces_and_bans(client, model):
    ask = {
        "model": model,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 4,
        "extra_body": {"return_token_ids": True},
    }
    free = ids(client.completions.create(**ask).choices[0])
    banned = ids(client.completions.create(**ask, logit_bias={str(free[0]): -100}).choices[0])
    assert banned[0] != free[0]
    forced = ids(client.completions.create(**ask, logit_bias={"500": 100}).choices[0])
    assert forced == [500] * 4


def test_logprobs_of_greedy_tokens_are_the_best(client, model):
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert bytes(entry.bytes).decode(errors="replace").startswith(entry.token[:1]) or entry.token.startswith(
            "bytes:"
        )


def test_prompts_as_ids_and_several_choices(client, model):
    ask = {"model": model, "temperature": 0, "max_tokens": 5, "extra_body": {"return_token_ids": True}}
    one = client.completions.create(**ask, prompt=[10, 20, 30])
    two = client.completions.create(**ask, prompt=[[10, 20, 30], [40, 50]], n=2)
    assert [c.index for c in two.choices] == [0, 1, 2, 3]
    assert ids(two.choices[0]) == ids(two.choices[1]) == ids(one.choices[0])


def test_thinking_is_apart(client, model):
    answer = client.chat.completions.create(
        model=model, messages=ASK, temperature=0, reasoning_effort="high", max_tokens=300
    )
    message = answer.choices[0].message
    assert "</think>" not in (message.content or "")
    assert message.model_extra["reasoning_content"]
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_errors_are_typed(client, model):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=ASK, temperature=7)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=ASK)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt=[5] * 100_000)
    assert long.value.code == "context_length_exceeded"


async def test_concurrent_requests_have_the_tokens_of_single_ones(endpoint, model):
    prompts = [[100 + i, 200 + i, 300 + i] for i in range(8)]
    async with openai.AsyncOpenAI(base_url=endpoint, api_key="none", max_retries=0, timeout=60) as client:

        async def run(prompt: list[int]) -> list[int]:
            answer = await client.completions.create(
                model=model,
                prompt=prompt,
                temperature=0,
                max_tokens=24,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            return ids(answer.choices[0])

        alone = [await run(prompt) for prompt in prompts]
        assert await asyncio.gather(*map(run, prompts)) == alone
