"""Templates that would run or grow without end are refused, and those that models come with are not."""

from __future__ import annotations

import time

import pytest

from lucevisor.text import template_limits
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
    TWICE.replace("TWICE", "[ns.x, ns.x]"),
    TWICE.replace("TWICE", "{'a': ns.x, 'b': ns.x}"),
    "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    *("{{ 'a' | center(10**9) }}", "{{ 'a'.center(10**9) }}", "{{ 'a'.ljust(width=10**9) }}", "{{ 'a'.zfill(10**9) }}"),
    *("{{ '\t'.expandtabs(10**9) }}", "{{ 'a' | indent(10**9, true) }}", "{{ ('a\n' * 9999) | indent('a' * 9999) }}"),
    *("{{ [1] | batch(10**9, 1) | list }}", "{{ [1] | slice(10**9) | list }}", "{{ 1.5 | round(10**9, 'ceil') }}"),
    *("{{ [1] | tojson(indent=10**9) }}", "{{ lipsum(n=10**6) }}", "{{ '%1000000000d' % 1 }}"),
    *("{{ '%*d' % (10**9, 1) }}", "{{ '%1000000000d' | format(1) }}", "{{ '{:1000000000}'.format(1) }}"),
    *("{{ '{:{}}'.format(1, 10**9) }}", "{{ '{:{w}}'.format_map({'w': 10**9}) }}", "{{ 'a'.encode().center(10**9) }}"),
    *("{{ (1).to_bytes(10**9, 'big') }}", "{{ 'a'.translate({97: 'b' * 99999}) }}", "{{ ('a' * 999999) | list }}"),
    *("{% for i in range(10**9) %}{% endfor %}", "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"),
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 0.2)


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


def test_each_rendering_has_a_budget_of_its_own(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_MADE", 20_000)
    template = ChatTemplate("{% for i in range(1000) %}{{ i | string }}{% endfor %}", {})
    assert {template.render(TALK).text for _ in range(5)} == {"".join(map(str, range(1000)))}


def test_a_long_talk_is_far_from_the_limits(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_CPU_S", 1.0)
    talk = [{"role": role, "content": "words"} for _ in range(100) for role in ("user", "assistant")]
    assert ChatTemplate.from_gguf(demo_metadata()).render(talk).text.count("words") == 200


def test_filters_keep_what_jinja_knows_of_their_arguments():
    source = "{{ [3, 1] | sort | join(',') }} {{ [{'a': 1}] | map(attribute='a') | list }} "
    source += "{{ ['x'] | map('upper') | first }}"
    assert ChatTemplate(source, {}).render(TALK).text == "1,3 [1] X"
