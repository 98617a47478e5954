"""Images through the whole of a service: splits, prefix cache, restarts, lost daemons, drafts."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.combinations import slow
from tests.e2e.process import Cli, post
from tests.e2e.vision_files import data_url, png, write_gemma_mmproj, write_mmproj, write_model
from tests.waiting import wait_until

pytest.importorskip("PIL", reason="Pillow reads the images")

PLACES = {
    1: ["left:0"],
    2: ["left:0", "right:0"],
    3: ["left:0", "right:0", "third:0"],
}
SPLITS = {
    "qwen35": {1: ["0-8"], 2: ["0-3", "3-8"], 3: ["0-3", "3-5", "5-8"]},
    "gemma4_moe": {2: ["0-3", "3-6"], 3: ["0-2", "2-4", "4-6"]},
}
WORDS = " ".join(f"rule {i}" for i in range(16))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each family."""
    parent = tmp_path_factory.mktemp("vision")
    for family in SPLITS:
        folder = parent / family
        (folder / "media").mkdir(parents=True)
        (folder / "media" / "one.png").write_bytes(png(1))
        (folder / "secret.png").write_bytes(png(2))
        write_model(folder / "model.gguf", family)
    write_mmproj(parent / "qwen35" / "mmproj.gguf")
    write_gemma_mmproj(parent / "gemma4_moe" / "mmproj.gguf")
    return parent


@pytest.fixture
def files(made: Path) -> Path:
    return made / "qwen35"


def config(files: Path, n_groups: int, encoder: str = "", extra: str = "") -> Path:
    devices = PLACES[n_groups]
    text = f'[model]\npath = "{files / "model.gguf"}"\n'
    for device in devices:
        text += f'[groups.{device[:-2]}]\nbackend = "cpu"\nthreads = 1\n'
    text += f"[placement]\ntarget_devices = {devices}\ntarget_layer_split = ".replace("'", '"')
    text += f"{SPLITS[files.name][n_groups]}".replace("'", '"')
    text += f'\n[engine]\ndtype = "float32"\n[vision]\npath = "{files / "mmproj.gguf"}"\n'
    text += f'device = "{encoder or devices[-1]}"\nmedia_path = "{files / "media"}"\nmax_tokens = 100\n'
    path = files / f"config-{n_groups}.toml"
    path.write_text(text + "[cache]\nmin_tokens = 1\n" + extra)
    return path


def question(*images: str, text: str = "what is it?", n: int = 24) -> dict[str, Any]:
    parts = [{"type": "text", "text": WORDS}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"messages": messages, "temperature": 0, "max_tokens": n, "ignore_eos": True, "return_token_ids": True}


def ask(url: str, *images: str, text: str = "what is it?", n: int = 24) -> tuple[list[int], int, int]:
    """Ids of the answer, tokens of the prompt, and how many of them were cached."""
    code, answer = post(f"{url}/v1/chat/completions", question(*images, text=text, n=n))
    assert code == 200, answer
    usage = answer["usage"]
    ids = answer["choices"][0]["token_ids"]
    return ids, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def kill(cli: Cli, group: str) -> None:
    os.kill(next(one["pid"] for one in cli.status()["groups"] if one["name"] == group), signal.SIGKILL)


ONE, TWO = data_url(png(1)), data_url(png(2, 40, 90))


@pytest.mark.parametrize("family", SPLITS)
def test_answers_are_the_same_over_any_split(cli: Cli, made: Path, family: str) -> None:
    files, found = made / family, {}
    for n_groups in SPLITS[family]:
        chunk = "engine.prefill_chunk=100" if n_groups == 3 else "engine.prefill_chunk=512"
        url = cli.start(config(files, n_groups), "cache.prefix_slots=0", chunk)["url"]
        found[n_groups] = [ask(url, *images)[0] for images in ((ONE,), (TWO,), (ONE, TWO), (TWO, ONE))]
        cli.stop()
    assert all(answers == found[2] for answers in found.values())
    assert found[2][0] != found[2][1], "an answer does not depend on its image"


@pytest.mark.parametrize("family", SPLITS)
def test_the_same_image_hits_the_prefix_cache_also_after_a_restart(
    cli: Cli, made: Path, family: str, tmp_path: Path
) -> None:
    path = config(made / family, 2, "left:0", f'dir = "{tmp_path / "cache"}"\n')
    url = cli.start(path)["url"]
    first, n_prompt, n_cached = ask(url, ONE)
    assert n_cached == 0
    again, _, reused = ask(url, ONE)
    assert again == first
    assert reused > n_prompt - 16, "the image is in the part that was reused"
    other, _, n_cached = ask(url, TWO)
    assert n_cached == 0, "tokens of another image were taken"
    assert other != first
    vision = cli.status()["vision"]
    assert (vision["encoded"], vision["reused"]) == (2, 1)
    wait_until(lambda: cli.status()["cache"]["saved"] >= 2, what="saved")
    cli.stop()
    url = cli.start(path)["url"]
    assert ask(url, ONE) == (first, n_prompt, reused)
    assert cli.status()["cache"]["tokens"]["disk"] > 0
    cli.stop()


@pytest.mark.parametrize(("family", "n_groups"), [("qwen35", 3), slow("qwen35", 2), slow("gemma4_moe", 3)])
def test_a_daemon_that_is_killed_loses_nothing(cli: Cli, made: Path, family: str, n_groups: int) -> None:
    """Every daemon in turn, that of the first stage with the embedding rows among them, and that of the encoder."""
    status = cli.start(config(made / family, n_groups))
    url = status["url"]
    images = (ONE, TWO)
    right = [ask(url, image, n=200)[0] for image in images]
    for group in status["groups"]:
        answers: list[list[int]] = [[], []]

        def run(i: int, answers: list[list[int]] = answers) -> None:
            answers[i] = ask(url, images[i], n=200)[0]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()

        def run_both(threads: list[threading.Thread] = threads) -> bool:
            """Or one has ended, where this process got no time to see them run."""
            return cli.status()["engine"]["running"] == 2 or not all(thread.is_alive() for thread in threads)

        wait_until(run_both, what="running")
        time.sleep(0.1)
        kill(cli, group["name"])
        for thread in threads:
            thread.join()
        assert answers == right
        wait_until(cli.ready, what="ready")
    cli.stop()


def test_an_image_waits_for_the_encoder(cli: Cli, files: Path) -> None:
    url = cli.start(config(files, 2, "right:0"))["url"]
    right = ask(url, ONE)[0]
    cli.stop()
    url = cli.start(config(files, 2, "right:0"))["url"]
    kill(cli, "right")
    assert ask(url, ONE)[0] == right
    cli.stop()


def test_a_decision_sees_the_image(cli: Cli, files: Path) -> None:
    """Also where nothing of its prompt stays cached for the labels of several tokens."""
    chats, found = [question(image)["messages"] for image in (ONE, TWO)], []
    for path in (config(files, 2), config(files, 1)):
        if found:
            path.write_text(path.read_text().replace("min_tokens = 1", "prefix_slots = 0"))
        url = cli.start(path)["url"]
        for messages in chats:
            code, answer = post(f"{url}/v1/decisions", {"messages": messages, "labels": ["yes", "no", "a long label"]})
            assert code == 200, answer
            found.append([one["logprob"] for one in answer["labels"]])
        cli.stop()
    assert found[:2] == [pytest.approx(one, abs=1e-3) for one in found[2:]]
    assert found[0] != pytest.approx(found[1], abs=1e-3)


def test_local_files_are_those_of_one_directory(cli: Cli, files: Path) -> None:
    url = cli.start(config(files, 1))["url"]
    named = (files / "media" / "one.png").as_uri()
    assert ask(url, named)[0] == ask(url, ONE)[0]
    for path in (files / "secret.png", files / "media" / ".." / "secret.png", files / "media" / "none.png"):
        code, answer = post(f"{url}/v1/chat/completions", question(f"file://{path}"))
        assert code == 400
        assert "vision.media_path" in answer["error"]["message"]
        assert answer["error"]["param"] == "messages[0].content[1].image_url"
    cli.stop()


def test_clients_send_images(cli: Cli, files: Path) -> None:
    """The packages of OpenAI, Anthropic and Ollama, as they are."""
    url = cli.start(config(files, 2))["url"]
    model, data = "tiny-qwen35", base64.b64encode(png(1)).decode()
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as of_openai,
        anthropic.Anthropic(base_url=url, api_key="none") as of_anthropic,
        ollama.Client(host=url) as of_ollama,
    ):
        parts: Any = [{"type": "image_url", "image_url": {"url": ONE}}, {"type": "text", "text": "what?"}]
        chat = of_openai.chat.completions.create(
            model=model, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=8
        )
        expected, n_prompt = chat.choices[0].message.content, chat.usage.prompt_tokens
        items: Any = [{"type": "input_image", "image_url": ONE}, {"type": "input_text", "text": "what?"}]
        response = of_openai.responses.create(
            model=model, input=[{"role": "user", "content": items}], temperature=0, max_output_tokens=8
        )
        assert response.output_text == expected
        source = {"type": "base64", "media_type": "image/png", "data": data}
        blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
        messages: Any = [{"role": "user", "content": blocks}]
        message = of_anthropic.messages.create(
            model=model, messages=messages, max_tokens=8, extra_body={"temperature": 0}
        )
        assert message.content[0].text == expected
        assert of_anthropic.messages.count_tokens(model=model, messages=messages).input_tokens == n_prompt
        options = {"temperature": 0, "num_predict": 8}
        asked = [{"role": "user", "content": "what?", "images": [png(1)]}]
        assert of_ollama.chat(model=model, messages=asked, options=options).message.content == expected
        assert of_ollama.generate(model=model, prompt="what?", images=[data], options=options).response == expected
    cli.stop()
