"""PFlash from the configuration to the response: the scoring model in a daemon of its own, beside the demo model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from lucevisor.model.gguf_files import open_model
from lucevisor.text.tokenizer import Tokenizer
from tests.daemon_forks import Forker
from tests.e2e.process import DEMO, ROOT, Cli
from tests.waiting import wait_until

SIZES = ("engine.max_context=1600", "engine.max_sequences=2")
DEMO_FOLDER = ROOT / "etc" / "demo"
WORDS = [f"{first}{last}" for first in ("tin", "oak", "sea", "ice", "sun") for last in ("man", "ton", "side", "ward")]
TEXTS = Tokenizer.from_gguf(open_model([DEMO_FOLDER / "demo-qwen35-22m-q4_k_m.gguf"]).metadata)


@pytest.fixture(scope="module")
def served(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cli, dict[str, Any]]]:
    """The demo with PFlash for prompts from 600 tokens on; the scoring model runs in group aside."""
    text = DEMO.read_text().replace('path = "demo/', f'path = "{DEMO_FOLDER}/')
    text += '[groups.aside]\nbackend = "cpu"\nthreads = 1\n'
    text += '[pflash]\nmode = "auto"\nthreshold = 600\nkeep_ratio = 0.25\ndevice = "aside:0"\n'
    text += f'path = "{DEMO_FOLDER}/demo-scorer-q8_0.gguf"\n'
    path = tmp_path_factory.mktemp("pflash") / "config.toml"
    path.write_text(text)
    cli = Cli(forker)
    try:
        status = cli.start(path, "engine.dtype=float32", "draft.kind=off", "cache.min_tokens=64", *SIZES)
        wait_until(lambda: attached(cli), what="the scoring model is attached")
        yield cli, status
        cli.stop()
    finally:
        cli.close()


def attached(cli: Cli) -> bool:
    return bool(cli.status()["pflash"]["state"] == "attached")


@pytest.fixture
def client(served: tuple[Cli, dict[str, Any]]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served[1]['url']}/v1", api_key="none", max_retries=0) as one:
        yield one


def text_of(n_words: int, seed: int) -> str:
    return " ".join(WORDS[(seed + i * i * (seed + 3)) % len(WORDS)] for i in range(n_words))


def completed(client: OpenAI, prompt: str) -> tuple[dict[str, Any], Any]:
    answer = client.completions.create(model="lucevisor-demo-22m", prompt=prompt, max_tokens=4, temperature=0)
    assert answer.usage is not None
    return (answer.usage.model_extra or {}).get("lucevisor", {}).get("pflash", {}), answer.usage


def test_a_long_prompt_is_shortened_and_a_short_one_is_not(served: tuple[Cli, dict[str, Any]], client: OpenAI) -> None:
    fact = "The secret number of the harbor is"
    prompt = f"{text_of(250, 1)}. {fact} 73935. {text_of(250, 2)} {fact} "
    n = len(TEXTS.encode(prompt))
    kept, usage = completed(client, prompt)
    assert kept == {"prompt_tokens": n, "kept_tokens": usage.prompt_tokens}
    assert abs(usage.prompt_tokens - 0.25 * n) <= 32
    kept, usage = completed(client, text_of(100, 1))
    assert kept == {}
    status = served[0].status()["pflash"]
    assert (status["state"], status["device"], status["prompts"]["compressed"]) == ("attached", "aside:0", 1)
    assert status["weight_bytes"] > 1e6
    assert "shortened 1 prompts" in served[0].run("status").stdout


def test_a_prompt_beyond_the_context_is_served_if_it_fits_when_it_is_shortened(client: OpenAI) -> None:
    kept, usage = completed(client, text_of(1500, 5))
    assert kept["prompt_tokens"] > 1600 > usage.prompt_tokens
    with pytest.raises(BadRequestError, match=r"has at least|has \d+ tokens"):
        completed(client, text_of(4000, 6))


def test_a_chat_keeps_hitting_the_prefix_cache_while_its_old_turns_shrink(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are terse."}]
    cached, prompts = [], []
    for turn in range(4):
        messages.append({"role": "user", "content": f"{text_of(260, turn)} What is {WORDS[turn]}?"})
        answer = client.chat.completions.create(
            model="lucevisor-demo-22m", messages=messages, max_tokens=8, temperature=0, stream=False
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        prompts.append(answer.usage.prompt_tokens)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    # A long turn is whole for one answer more, then shrinks: what is before it is in the cache, what follows is new.
    n_turn = len(TEXTS.encode(messages[1]["content"]))
    assert prompts[0] < n_turn, "the first question is shortened at once"
    assert prompts[-1] < 2 * n_turn, "three of four turns are short, the last is whole"
    assert cached[1] >= prompts[0] - 16
    assert all(later > earlier for earlier, later in pairwise(cached[1:]))


def test_without_its_daemon_prompts_stay_whole_and_no_request_fails(
    served: tuple[Cli, dict[str, Any]], client: OpenAI
) -> None:
    cli = served[0]
    [group] = [each for each in cli.status()["groups"] if each["name"] == "aside"]
    os.kill(group["pid"], signal.SIGSTOP)  # it is asked, and does not answer
    prompt = text_of(500, 9)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(completed, client, prompt)
        time.sleep(0.3)
        os.kill(group["pid"], signal.SIGKILL)
        kept, usage = asked.result(100)
    n = len(TEXTS.encode(prompt))
    assert (kept["prompt_tokens"], kept["kept_tokens"], usage.prompt_tokens) == (n, n, n)
    assert "scoring model" in kept["reason"]
    assert cli.status()["pflash"]["prompts"]["failed"] == 1
    wait_until(lambda: attached(cli), what="the scoring model is attached again")
    kept, _ = completed(client, text_of(500, 11))
    assert "reason" not in kept
    assert kept["kept_tokens"] < kept["prompt_tokens"]
