"""The mistakes of docs/features.md in requests: what stands there is sent, and the answer must say what is written."""

from __future__ import annotations

import httpx
import pytest

from tests.api.conftest import Live
from tests.api.scripted_model import Rig
from tests.mistakes.page import table

ROWS = table("Mistakes in requests")
HI = '"messages": [{"role": "user", "content": "Hi"}]'


@pytest.fixture(scope="module")
def server():
    one = Live(Rig)
    yield one
    one.close()


@pytest.mark.parametrize(("number", "sent", "status", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_mistake(number, sent, status, words, server):
    method, path, *body = sent.split(" ", 2)
    content = (body[0] if body else "").replace("HI", HI).encode()
    headers = {"content-type": "application/json"} if content else {}
    answer = httpx.request(method, server.url + path, content=content, headers=headers, timeout=120)
    error = answer.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    assert answer.status_code == int(status)
