"""`status` and `top` as text: they fit 80 columns, and names are never markup."""

from __future__ import annotations

import copy
import io
import json
import re
import shlex
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lucevisor.cli.progress import first_request
from lucevisor.cli.status_view import bar, kernel_table, page_line, status_view, wait_view
from lucevisor.cli.top import screen, stage_loads

STAGE = {"steps": 1000, "compute_s": 2.0, "wait_s": 1.0}


def group(name, stage, start, stop, **more):
    device = {
        "device": f"{name}:0", "layers": [start, stop], "weight_bytes": 141 << 30, "state_bytes": 40 << 30,
        "free_bytes": 3 << 28, "total_bytes": 200 << 30,
    }  # fmt: skip
    return {
        "name": name, "pid": 4_194_304, "state": "ready", "state_s": 5.0, "reason": "", "loading": None,
        "restarts": 12, "host": "", "daemon_pid": 7, "path": None, "retry_in_s": None,
        "stages": [stage], "devices": [device], "warnings": [],
    } | more  # fmt: skip


def request(name, first_token_s, n_generated):
    return {
        "id": name, "elapsed_s": 123.4, "first_token_s": first_token_s, "prompt_tokens": 262_144,
        "generated_tokens": n_generated, "accepted_tokens": n_generated // 2,
    }  # fmt: skip


def status(**more):
    use = {"total": 262_144, "used": 1_072, "cached": 99_999}
    draft = {
        "kind": "dflash", "name": "drafter", "device": "right:0", "state": "attached", "reason": "", "paused": "",
        "verify_slices": 0,
    }  # fmt: skip
    pflash = {
        "name": "scorer", "device": "right:0", "state": "detached", "reason": "group right is BACKOFF",
        "prompts": {"compressed": 99_999, "failed": 9}, "tokens": 10**9, "kept": 10**8, "seconds": 12_345.6,
    }  # fmt: skip
    vision = {
        "name": "encoder", "device": "left:0", "state": "detached", "reason": "group left is BACKOFF",
        "encoded": 99_999, "reused": 88_888, "seconds": 12_345.6,
    }  # fmt: skip
    cache = {
        "max_slots": 32, "prefix_slots": 31, "used_bytes": 1 << 29, "max_bytes": 1 << 30,
        "prompts": 99_999, "hits": 88_888,
        "tokens": {"device": 1_000_000, "host": 7, "disk": 5}, "host_slots": 99_999, "host_bytes": 1 << 38,
        "host_max_bytes": 1 << 39, "dir": "/var/cache/lucevisor", "disk_max_bytes": 20 << 30, "snapshots": 12,
        "snapshot_bytes": 1 << 33, "saved": 1, "restored": 2, "failures": {},
    }  # fmt: skip
    return {
        "name": "box", "pid": 1, "url": "http://127.0.0.1:8080", "state": "ready", "reason": "", "retry_in_s": None,
        "model": {"name": "qwen3.6-27b", "architecture": "qwen35", "layers": 64, "quant": "Q4_K"},
        "groups": [group("left", 0, 0, 32), group("right", 1, 32, 64)],
        "engine": {
            "running": 8, "queued": 120, "held": 0, "tokens_per_s": 1234.5,
            "recovery": {"held_s": 0.0, "rebuilding_tokens": {"done": 0, "of": 0}},
            "pages": {"out": 0, "spaces": {"full": use, "recurrent": use}}, "stages": [dict(STAGE), dict(STAGE)],
        },
        "requests": [request("req-0123456789abcdef01234567", None, 0), request("x" * 128, 0.5, 100_000)],
        "draft": draft, "pflash": pflash, "vision": vision, "cache": cache, "overrides": [], "models": [],
        "cluster": None,
        "host_memory": [
            {"owner": "boundaries", "limit_bytes": 1 << 20, "key": "", "bytes": 1 << 20},
            {"owner": "journal", "limit_bytes": 2 << 30, "key": "recovery.journal", "bytes": 512 << 20},
            {"owner": "prefixes", "limit_bytes": 4 << 30, "key": "cache.host", "bytes": 0},
            {"owner": "exports", "limit_bytes": None, "key": "", "bytes": 3 << 20},
        ],
    } | more  # fmt: skip


def printed(view, width=80):
    output = io.StringIO()
    Console(file=output, width=width).print(view)
    return output.getvalue()


def test_the_scoring_model_is_shown_while_there_is_one():
    text = printed(status_view(status()))
    assert "scoring model scorer on right:0 is detached: group right is BACKOFF" in text
    assert "shortened 99999 prompts" in text
    assert "scoring model" not in printed(status_view(status(pflash={"state": "none"})))


def test_the_vision_encoder_is_shown_while_there_is_one():
    text = printed(status_view(status()))
    assert "vision encoder encoder on left:0 is detached: group left is BACKOFF; 99999 images" in " ".join(text.split())
    assert "vision encoder" not in printed(status_view(status(vision={"state": "none"})))


def test_status_fits_80_columns():
    text = printed(status_view(status()))
    assert max(map(len, text.splitlines())) <= 80
    for words in (
        "box ready  http://127.0.0.1:8080  pid 1",
        "full pages 1072 of 262144 (99999 cached)",
        "prefix slots 31 of 32, 512.0 MiB of 1.00 GiB",
        "in host memory 99999, 256.0 GiB of 512.0 GiB",
        "host memory: boundaries 1.00 MiB, journal 512.0 MiB of 2.00 GiB, exports 3.00",
    ):
        assert words in text
    assert [line.split()[:3] for line in text.splitlines() if ":0 " in line and "[" in line] == [
        ["left:0", "[0,32)", "ready"],
        ["right:0", "[32,64)", "ready"],
    ]


def test_groups_on_other_hosts_are_named_with_the_way_there():
    path = {"round_trip_s": 2.3e-4, "bytes_per_s": 110 << 20}
    remote = group("right", 1, 32, 64, host="attic", path=path)
    cluster = {"listen": "10.0.0.1:7000", "refused": 12}
    text = printed(status_view(status(groups=[group("left", 0, 0, 32), remote], cluster=cluster)), 100)
    assert re.search(r"right:0 on attic +\[32,64\) +ready +7 +12 ", text)
    assert "group right on attic: round trip 230 us, at least 110.0 MiB/s" in text
    assert "12 connections to 10.0.0.1:7000 were refused" in text
    away = group("right", 1, 32, 64, host="attic", state="backoff", reason="no route to host", daemon_pid=None)
    text = printed(status_view(status(groups=[away], cluster=cluster)), 100)
    assert "group right on attic is backoff for 5.00 s: no route to host" in text


def test_a_group_that_is_away_says_why_and_how_far_it_is():
    loading = {"phase": "read", "done_bytes": 1 << 30, "total_bytes": 4 << 30}
    away = group("right", 1, 32, 64, state="loading", reason="it was killed", loading=loading, devices=[])
    away["retry_in_s"] = 12.0
    told = status(state="degraded", groups=[group("left", 0, 0, 32), away])
    for view in (status_view(told), screen(told, told, 1.0, deque())):
        text = printed(view)
        assert "group right is loading for 5.00 s: it was killed; tries again in 12.00 s" in text
        assert "━" * 8 + "─" * 22 + " read 1.00 GiB of 4.00 GiB" in text


def test_what_makes_a_group_slow_is_told_while_it_serves():
    slow = group("left", 0, 0, 64, warnings=["no C++ compiler: install g++, or set CXX"])
    text = printed(status_view(status(groups=[slow])), width=200)
    assert "group left is slow: no C++ compiler: install g++, or set CXX" in text


def test_overrides_say_what_they_hide():
    overrides = [
        {"key": "server.port", "value": "0", "source": "start", "hides": 8080},
        {"key": "placement.target_layer_split", "value": "1,3", "source": "reload", "hides": None},
        {"key": "groups.left.env.KEY", "value": None, "source": "start", "hides": None},
    ]
    text = printed(status_view(status(overrides=overrides)), width=200)
    assert "server.port = 0 by start --set; the file has 8080" in text
    assert "placement.target_layer_split = 1,3 by reload --set; which the file does not set" in text
    assert "groups.left.env.KEY = not shown by start --set" in text


def test_a_failed_group_says_when_it_is_tried_again():
    away = group("right", 1, 32, 64, state="failed", reason="it was killed", retry_in_s=90.0, devices=[])
    assert "group right is failed for 5.00 s: it was killed; tries again in 90.00 s" in printed(
        status_view(status(groups=[away])), width=200
    )


def test_requests_that_are_held_and_a_rebuild():
    told = status(state="degraded")
    told["engine"] |= {"held": 3, "recovery": {"held_s": 2.5, "rebuilding_tokens": {"done": 100, "of": 200}}}
    text = printed(status_view(told))
    assert "3 requests are held for 2.50 s" in text
    assert "━" * 15 + "─" * 15 + " rebuilt 100 of 200 tokens" in text


def with_replicas():
    told = status()
    parts = [copy.deepcopy(told), copy.deepcopy(told)]
    parts[0] |= {"replica": "a", "groups": ["left"], "state": "ready", "reason": ""}
    parts[1] |= {"replica": "b", "groups": ["right"], "state": "degraded", "reason": "group right is BACKOFF"}
    for part in parts:
        part["engine"] |= {"running": 3, "tokens_per_s": 20.0, "stages": [dict(STAGE)]}
    told["groups"][1] |= {"state": "backoff", "stages": [0]}
    return told | {"models": parts}


def test_replicas_have_a_part_each_and_their_state():
    text = printed(status_view(with_replicas()), width=200)
    assert "qwen3.6-27b (qwen35, 64 layers, Q4_K), 2 replicas" in text
    assert text.count("qwen3.6-27b") == 1
    lines = [line.strip() for line in text.splitlines()]
    assert "replica a ready" in lines
    assert "replica b degraded: group right is BACKOFF" in lines
    assert [line.split()[-1] for line in lines if line.startswith(("left:0", "right:0"))] == ["a", "b"]


def test_top_adds_replicas_up_and_shows_the_stages_of_each():
    before, now = with_replicas(), with_replicas()
    now["models"][1]["engine"]["stages"][0] = {"steps": 1100, "compute_s": 2.5, "wait_s": 1.25}
    assert [(load.name, load.n_steps, load.compute) for load in stage_loads(before, now, 1.0)] == [
        ("0 left", 0, 0.0),
        ("0 right", 100, 0.5),
    ]
    text = printed(screen(before, now, 1.0, deque()))
    assert "40.0 tokens/s" in text
    assert "running 6" in text
    assert "replica a ready" in text
    assert "replica b degraded" in text


def test_names_are_text():
    odd = "[red]x[/red]"
    told = status(name=odd, reason="[/]", state="degraded")
    told["groups"][0] |= {"name": odd, "state": "backoff", "reason": "[/no]", "devices": []}
    told["requests"][0]["id"] = odd
    assert printed(status_view(told)).count(odd) >= 2
    assert odd in printed(screen(told, told, 1.0, deque()))
    assert "[/no]" in printed(status_view(told))


@pytest.mark.parametrize("width", [80, 200])
def test_top_fits(width):
    text = printed(screen(status(), status(), 1.0, deque([1.0, 5.0, 0.0]), width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "waits" in text
    assert "50000 50%" in text


def test_loads_are_of_the_time_between_two_answers():
    before = status()
    now = copy.deepcopy(before)
    now["engine"]["stages"][0] |= {"steps": 1100, "compute_s": 2.5, "wait_s": 1.2}
    first, second = stage_loads(before, now, 1.0)
    assert (first.name, first.n_steps, first.waits_for) == ("0 left", 100, "the next step")
    assert (first.compute, first.step_s) == pytest.approx((0.5, 0.005))
    assert first.wait == pytest.approx(0.2)
    assert (second.n_steps, second.compute, second.waits_for) == (0, 0.0, "0 left")


@given(st.lists(st.floats(-1, 3), max_size=4), st.integers(1, 200))
def test_a_bar_is_as_wide_as_it_should_be(shares, width):
    assert len(bar(*((share, "red") for share in shares), width=width).plain) == width


def test_the_live_view_says_what_is_waited_for_and_has_no_empty_bars():
    kernels = {"phase": "kernels", "done_bytes": 0, "total_bytes": 0}
    text = printed(
        wait_view("start", [group("right", 1, 32, 64, state="loading", reason="hello", loading=kernels)], 3.2)
    )
    assert text.splitlines()[1] == "  kernels"
    loading = {"phase": "read", "done_bytes": 0, "total_bytes": 4 << 30}
    away = group("right", 1, 32, 64, state="loading", reason="hello", loading=loading)
    text = printed(wait_view("start", [group("left", 0, 0, 32), away], 3.25))
    assert text.splitlines() == ["group right is loading for 5.00 s: hello", "start: 3.2 s, waiting for group right"]
    loading["done_bytes"] = 2 << 30
    assert "━" * 15 + "─" * 15 + " read 2.00 GiB of 4.00 GiB" in printed(wait_view("start", [away], 3.25))
    assert printed(wait_view("start", [], 0.0)) == "start: 0.0 s, waiting for the pipeline\n"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://[fe80::1]:65535"])
def test_the_curl_lines_fit_80_columns(url):
    lines = first_request(url, keys=True)
    assert max(map(len, lines)) <= 80
    command = shlex.split("\n".join(lines[1:]))
    body = json.loads(command[command.index("-d") + 1])
    assert body == {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0}


def test_pages_that_are_out_are_told_with_those_in_host_memory():
    pages = {"spaces": {}, "out": 7, "host": 5, "host_total": 40}
    assert page_line(pages) == "7 paged out (5 of 40 in host memory)"
    assert page_line(pages | {"host_total": 0}) == "7 paged out"


def test_kernels_are_listed_by_group_device_and_operation():
    groups = [
        {"name": "cpu", "kernels": {"cpu linear Q4_K": "tiles, [bold]c++", "cpu layers": "torch"}},
        {"name": "lost", "kernels": {}},
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(kernel_table({"groups": groups}))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["cpu", "cpu", "layers", "torch"] in rows
    assert ["cpu", "cpu", "linear", "Q4_K", "tiles,", "[bold]c++"] in rows


def test_several_models_have_a_part_and_a_table_each():
    names = ["Qwen2.5-Coder-1.5B-Instruct-Q4_K_M", "b"]
    models = {name: {**status()["model"], "name": name} for name in names}
    parts = [{**status(), "name": name, "model": model} for name, model in models.items()]
    groups = [group("left", 0, 0, 32), {**group("right", 1, 32, 64), "devices": []}]
    groups[0]["devices"] = [{**groups[0]["devices"][0], "model": name} for name in names]
    told = status(models=parts, groups=groups)
    text = printed(status_view(told), width=80)
    for name in names:
        assert f"{name} (qwen35, 64 layers, Q4_K)" in text
        assert f"\n{name} ready" in text
        lines = [line.split() for line in text.splitlines()]
        assert [line[:1] for line in lines[lines.index([name]) :][2:5:2]] == [["device"], ["left:0"]]
    assert ["right", "-"] in [line[:2] for line in lines]
    assert printed(screen(told, told, 1.0, deque())).count("left:0") == 1
    assert text.count("running 8, queued 120") == 2
