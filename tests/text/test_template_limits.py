"""Templates that would run or grow without end are refused, and those that models come with are not."""

from __future__ import annotations

import time

import pytest

from lucevisor.text import template_language
from lucevisor.text.template import ChatTemplate, TemplateError
from tests.text.vocabularies import demo_metadata

TALK = [{"role": "user", "content": "x"}]
TWICE = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = TWICE %}{% endfor %}{{ ns.x }}"

GROWING = [
    *("{{ 'a' * 10**9 }}", "{{ 10**9 * 'a' }}", "{{ [0] * 10**9 }}", "{{ (0,) * 10**10 }}", "{{ 2**100000000 }}"),
    *(TWICE.replace("TWICE", by) for by in ("ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "[ns.x, ns.x] | join(ns.x)")),
    *(
        TWICE.replace("TWICE", by)
        for by in ("ns.x.join([ns.x, ns.x])", "ns.x.replace('a', 'aa')", "ns.x | replace('', ns.x)")
    ),
    TWICE.replace("'a'", "messages[0].content").replace("TWICE", "ns.x + ns.x"),
    "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    *("{{ ('a\n' * 9999) | indent('a' * 9999) }}", "{{ lipsum(n=10**6) }}", "{% for i in range(10**9) %}{% endfor %}"),
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(template_language, "MAX_CPU_S", 0.2)


@pytest.mark.parametrize("source", GROWING)
def test_what_grows_without_end_is_refused(short, source):
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(TALK)


RUNNING = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n else '' }}{{ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    "{% set x = range(99999) | list %}{% for i in x if 77777777 in x %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = range(9999) | map('string') | list %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(9999)) if i < 99 }}{% endfor %}",
]


@pytest.mark.parametrize("source", RUNNING)
def test_what_runs_without_end_is_stopped_by_its_time(short, source):
    began_s = time.thread_time()
    with pytest.raises(TemplateError, match=r"takes longer than 0\.2 s|recursion"):
        ChatTemplate(source, {}).render(TALK)
    assert time.thread_time() - began_s < 20


def test_a_long_source_is_refused_and_a_long_answer_is_not():
    with pytest.raises(TemplateError, match=f"has more than {256 << 10} characters"):
        ChatTemplate("a" * ((256 << 10) + 1), {})
    long = "x" * 4_000_000
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": long}]).text == long


def test_a_long_talk_is_far_from_the_limits(monkeypatch):
    monkeypatch.setattr(template_language, "MAX_CPU_S", 1.0)
    talk = [{"role": role, "content": "words"} for _ in range(100) for role in ("user", "assistant")]
    assert ChatTemplate.from_gguf(demo_metadata()).render(talk).text.count("words") == 200


def test_filters_keep_what_jinja_knows_of_their_arguments():
    source = "{{ [3, 1] | sort | join(',') }} {{ [{'a': 1}] | map(attribute='a') | list }} "
    source += "{{ ['x'] | map('upper') | first }}"
    assert ChatTemplate(source, {}).render(TALK).text == "1,3 [1] X"
