"""The status page in a headless Chromium, over a running supervisor.

With LUCEVISOR_SCREENSHOTS=DIRECTORY the pictures of docs/metrics.md are written there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import DEMO, Cli
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect  # looks from outside: the page's own policy forbids to evaluate strings

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as play:
        one = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Open the page; any error it logs fails the test, a refused or lost answer aside."""
    contexts, problems = [], []

    def run(url: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: said.type == "error" and problems.append(said.text))
        page.goto(url)
        return page

    yield run
    for context in contexts:
        context.close()
    assert not [text for text in problems if "Failed to load resource" not in text]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, forker: Any) -> Iterator[tuple[Cli, str, int]]:
    """A supervisor with an admin key."""
    keys = tmp_path_factory.mktemp("keys") / "admin"
    keys.write_text("root-key\n")
    keys.chmod(0o600)
    cli = Cli(forker)
    try:
        status = cli.start(DEMO, "engine.dtype=float32", f"server.admin_keys_file={keys}")
        yield cli, status["url"], status["pid"]
        cli.stop()
    finally:
        cli.close()


def ask(page: Any, text: str) -> str:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#log > div").last.locator(".small").last).to_contain_text("tokens", timeout=20_000)
    return str(page.locator("#log .answer").last.inner_text())


def test_the_page_shows_the_box_and_streams_a_chat(box: tuple[Cli, str, int], open_page: Any) -> None:
    page = open_page(box[1], viewport={"width": 1280, "height": 900})
    page.wait_for_selector("#state.ready")
    assert page.locator(".shard").count() == 2
    assert "layers 0 to 3" in page.locator(".shard").first.inner_text()
    assert "layers 4 to 7" in page.locator(".shard").last.inner_text()
    expect(page.locator("#sampling")).to_contain_text("temperature")
    page.click("#ask summary")
    page.fill("#system", "Answer in one sentence.")
    page.fill("#temperature", "0")
    assert "join" in ask(page, "What does os.path.join do?").lower()
    assert "tokens/s" in page.locator("#log .small").last.inner_text()
    expect(page.locator("#generated")).not_to_have_text("0")
    expect(page.locator("#drafts")).to_contain_text("tokens a verify step")
    page.click("#new-chat")
    assert page.locator("#log").inner_text() == ""


def test_of_several_models_one_is_chosen_for_the_chat(open_page: Any, tmp_path: Path, forker: Any) -> None:
    file, model = tmp_path / "box.toml", DEMO.parent / "demo/demo-qwen35-22m-q4_k_m.gguf"
    tables = "".join(f'[models.{name}]\npath = "{model}"\nname = "{EVIL} {name}"\n' for name in "ab")
    file.write_text(f'{tables}[groups.cpu]\nbackend = "cpu"\n')
    cli = Cli(forker)
    try:
        page = open_page(cli.start(file)["url"])
        page.wait_for_selector("#state.ready")
        assert page.locator("#chat-model option").all_inner_texts() == [f"{EVIL} a", f"{EVIL} b"]
        cards = [card.inner_text() for card in page.locator(".shard").all()]
        assert [f"of {EVIL} {name}" in card for name, card in zip("ab", cards, strict=True)] == [True, True]
        page.select_option("#chat-model", f"{EVIL} b")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "What does os.path.join do?")
        assert sent.value.post_data_json["model"] == f"{EVIL} b"
        assert page.title() != "owned"
        cli.stop()
    finally:
        cli.close()


def test_answers_are_markdown_and_can_be_copied(box: tuple[Cli, str, int], open_page: Any) -> None:
    page = open_page(box[1], permissions=["clipboard-read", "clipboard-write"])
    page.wait_for_selector("#state.ready")
    text = "# Title\n\nUse `a*b*c`, **bold**, *it*, *args and **kwargs\n- one\n\n| a |\n|---|\n| 1 |\n\n"
    text += "```py\nx = 1\n```\n"
    text += "[here](https://e.example/) [no](javascript:alert(1))"

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        chunks = [{"choices": [{"delta": {"content": part}}]} for part in (text[:50], text[50:])]
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, usage]) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    sent: list[dict[str, Any]] = []
    page.route("**/v1/chat/completions", answer)
    ask(page, "Hi")
    assert sent[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert "temperature" not in sent[0]  # the model card's
    shown = page.locator("#log .answer").last
    for tag, says in (("h3", "Title"), ("code", "a*b*c"), ("strong", "bold"), ("em", "it"), ("li", "one"), ("td", "1")):
        assert shown.locator(tag).inner_text() == says
    assert shown.locator("pre").inner_text() == "x = 1"
    assert [one.get_attribute("href") for one in shown.locator("a").all()] == ["https://e.example/"]
    page.click("#log .copy")
    expect(page.locator("#log .copy")).to_have_text("Copied")


def test_text_never_becomes_markup(box: tuple[Cli, str, int], open_page: Any) -> None:
    page = open_page(box[1])
    page.wait_for_selector("#state.ready")

    def answer(route: Any) -> None:
        deltas = [
            {"reasoning_content": EVIL},
            {"content": EVIL[:9]},
            {"content": EVIL[9:] + "\n```html\n" + EVIL + "\n```"},
        ]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, usage]) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    def status(route: Any) -> None:
        told = route.fetch().json()
        told["model"]["name"] = told["groups"][0]["name"] = told["groups"][0]["devices"][0]["device"] = EVIL
        told["groups"][1] |= {"state": EVIL, "reason": EVIL, "devices": []}
        told["requests"] = [told["requests"][0] if told["requests"] else {
            "id": EVIL, "path": EVIL, "elapsed_s": 1, "first_token_s": None, "prompt_tokens": 1,
            "generated_tokens": 0, "accepted_tokens": 0,
        }]  # fmt: skip
        route.fulfill(json=told)

    page.route("**/v1/chat/completions", answer)
    page.route("**/status", status)
    assert EVIL in ask(page, EVIL)
    expect(page.locator("#requests")).to_contain_text("<img")
    assert page.locator("main img, main script").count() == 0
    assert not page.title().startswith("owned")


def test_pauses_spares_keys_and_host_memory_are_shown_where_there_are_any(
    box: tuple[Cli, str, int], open_page: Any
) -> None:
    page = open_page(box[1])
    page.wait_for_selector("#state.ready")
    expect(page.locator("#shards")).not_to_contain_text("spares")
    expect(page.locator("#pages")).not_to_contain_text("host memory")
    expect(page.locator("#scoring")).to_be_hidden()

    def status(route: Any) -> None:
        told = route.fetch().json()
        told["groups"][0]["spares"] = [{"warm": True}, {"warm": False}]
        told["engine"]["pages"] |= {"host": 5, "host_total": 20, "out": 7}
        recovery = {"pauses": {"loss": 2, "restart": 0}, "longest_pause_s": 0.5, "sequences": 3, "rebuilt_tokens": 40}
        told["engine"]["recovery"] |= {**recovery, "recomputed_tokens": 0, "kept_tokens": 90}
        told["draft"] |= {"verify_slices": 9, "acceptance_length": 2.0, "acceptance_by_position": [0.5]}
        told["pflash"] |= {"state": "attached", "name": "scorer", "device": "left:0", "tokens": 1000, "kept": 250}
        told["pflash"]["prompts"] |= {"compressed": 3, "failed": 1}
        told["requests"] = [{
            "id": "req-1", "key": "ann", "path": "/v1/messages", "elapsed_s": 1, "first_token_s": None,
            "prompt_tokens": 1, "generated_tokens": 0, "accepted_tokens": 0,
        }]  # fmt: skip
        route.fulfill(json=told)

    page.route("**/status", status)
    expect(page.locator("#pauses")).to_have_text(
        "Pauses since the start: 2 loss, longest 500 ms; 3 requests went on, tokens: 90 kept, 40 rebuilt"
    )
    expect(page.locator("#shards")).to_contain_text("spares 1 of 2 warm")
    expect(page.locator("#scoring")).to_contain_text("3 prompts shortened, 250 of 1,000 tokens kept")
    expect(page.locator("#scoring")).to_contain_text("1 prompts could not be scored")
    expect(page.locator("#pages")).to_contain_text("5 used, 20 in all")
    expect(page.locator("#pages")).to_contain_text("7 pages of running sequences are paged out")
    expect(page.locator("#drafts")).to_contain_text("2.00 tokens a verify step")
    assert page.locator("#requests th").all_inner_texts()[:2] == ["request", "key"]
    expect(page.locator("#requests td").nth(1)).to_have_text("ann")


def test_a_group_is_restarted_with_the_admin_key(box: tuple[Cli, str, int], open_page: Any) -> None:
    cli, url, _ = box
    page = open_page(url)
    page.wait_for_selector("#state.ready")
    page.on("dialog", lambda dialog: dialog.accept())
    before = cli.status()["groups"][1]
    page.click("button[data-group=right]")
    assert page.locator("#keys").is_visible()  # no key yet
    page.fill("#admin-key", "root-key")
    page.press("#admin-key", "Enter")
    page.click("button[data-group=right]")
    wait_until(lambda: cli.status()["groups"][1]["restarts"] == before["restarts"] + 1, what="the restart")
    wait_until(lambda: cli.status()["state"] == "ready", what="ready")
    expect(page.locator("#recovery")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits(box: tuple[Cli, str, int], open_page: Any, tmp_path: Path, width: int, scheme: str) -> None:
    directory = Path(os.environ.get("LUCEVISOR_SCREENSHOTS", tmp_path))
    page = open_page(box[1], viewport={"width": width, "height": 844}, color_scheme=scheme)
    page.wait_for_selector("#state.ready")
    phone = width < 900
    if phone:
        page.click("#show-chat")
    page.click("#ask summary")
    page.fill("#temperature", "0")
    ask(page, "Which function of module math returns the square root?")
    for view in ("box", "chat") if phone else ("page",):
        if phone:
            page.click(f"#show-{view}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        path = directory / f"status-{view}-{width}-{scheme}.png"
        page.screenshot(path=path, full_page=view == "box")
        assert path.stat().st_size > 10_000
