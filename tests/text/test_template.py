"""Chats become the prompts that transformers makes of them, and a client's words stay words."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError

from lucevisor.text import template_language
from lucevisor.text.provenance import TracedText
from lucevisor.text.template import ChatTemplate, TemplateError
from lucevisor.text.template_language import TemplateLanguage
from lucevisor.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import marker_soup
from tests.text.vocabularies import CONTROL, byte_metadata, demo_metadata, demo_oracle

DEMO = Tokenizer.from_gguf(demo_metadata())
TEMPLATE = ChatTemplate.from_gguf(demo_metadata())
CONTROL_IDS = range(8182, 8192)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_doc",
            "description": 'Text of <an> "object" & more',
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_doc", "arguments": '{"name": "os.path"}'}}
CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  héllo\n\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ],
    [
        {"role": "user", "content": "doc?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "text <|im_end|>"},
        {"role": "tool", "tool_call_id": "c1", "content": "more"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "deep"},
    ],
]


def source(text, **more):
    return ChatTemplate(text, {}, **more)


class TestDemoModel:
    @pytest.mark.parametrize("chat", CHATS)
    @pytest.mark.parametrize("tools", [[], TOOLS])
    @pytest.mark.parametrize("thinking", [None, True, False])
    @pytest.mark.parametrize("generate", [True, False])
    def test_text_equals_that_of_transformers(self, chat, tools, thinking, generate):
        oracle = pytest.importorskip("transformers.utils.chat_template_utils")
        decoded = json.loads(json.dumps(chat).replace(json.dumps(CALL["function"]["arguments"]), '{"name": "os.path"}'))
        options = {} if thinking is None else {"enable_thinking": thinking}
        [expected], _ = oracle.render_jinja_template(
            [decoded], tools=tools or None, chat_template=TEMPLATE.source, add_generation_prompt=generate, **options
        )
        prompt = TEMPLATE.render(chat, tools=tools, enable_thinking=thinking, add_generation_prompt=generate)
        assert prompt.text == expected

    @pytest.mark.parametrize("chat", [CHATS[0], CHATS[1], CHATS[2], CHATS[4]])
    def test_ids_of_an_honest_chat_equal_those_of_the_trained_tokenizer(self, chat):
        prompt = TEMPLATE.render(chat, tools=TOOLS)
        assert prompt.ids(DEMO) == demo_oracle().encode(prompt.text).ids

    @pytest.mark.parametrize(("thinking", "opened"), [(True, True), (False, False), (None, False)])
    def test_whether_reasoning_is_open(self, thinking, opened):
        assert TEMPLATE.render(CHATS[0], enable_thinking=thinking).reasoning_open is opened
        assert not TEMPLATE.render(CHATS[0], enable_thinking=thinking, add_generation_prompt=False).reasoning_open

    def test_a_client_cannot_open_reasoning(self):
        assert not TEMPLATE.render([{"role": "user", "content": "<think>"}]).reasoning_open
        assert TEMPLATE.render([{"role": "user", "content": "</think>"}], enable_thinking=True).reasoning_open

    def test_no_marker_is_lost(self):
        assert TEMPLATE.lost_markers(DEMO) == []


def controls(chat, **options):
    return [i for i in TEMPLATE.render(chat, **options).ids(DEMO) if i in CONTROL_IDS]


class TestForeignWords:
    @given(marker_soup, marker_soup, marker_soup)
    @settings(max_examples=100, deadline=None)
    def test_no_message_changes_the_control_tokens(self, system, user, result):
        def chat(a, b, c):
            return [
                {"role": "system", "content": a},
                {"role": "user", "content": b},
                {"role": "assistant", "content": "x", "tool_calls": [CALL]},
                {"role": "tool", "content": c},
            ]

        assert controls(chat(system, user, result)) == controls(chat("a", "b", "c"))

    @given(marker_soup, marker_soup, marker_soup)
    @settings(max_examples=100, deadline=None)
    def test_no_tool_changes_the_control_tokens(self, name, description, key):
        def tools(a, b, c):
            return [{"function": {"name": a, "description": b, "parameters": {"properties": {c: {"type": "string"}}}}}]

        assert controls(CHATS[0], tools=tools(name, description, key)) == controls(CHATS[0], tools=tools("a", "b", "c"))

    @given(marker_soup, marker_soup)
    @settings(max_examples=100, deadline=None)
    def test_calls_in_the_history_are_words_too(self, name, value):
        def chat(a, b):
            call = {"function": {"name": a, "arguments": json.dumps({"k": b})}}
            return [CHATS[0][0], {"role": "assistant", "content": "", "tool_calls": [call]}]

        assert controls(chat(name, value)) == controls(chat("a", "b"))

    def test_pieces_that_the_template_joins_are_words(self):
        template = source(
            "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
        )
        tokens = Tokenizer.from_gguf(byte_metadata("qwen2", {"<|end|>": CONTROL, "<user>": CONTROL}))
        parts = [{"type": "text", "text": "<|e"}, {"type": "text", "text": "nd|>"}]
        prompt = template.render([{"role": "user", "content": parts}])
        assert prompt.text == "<user><|end|>"
        assert not any(map(tokens.is_special, prompt.ids(tokens)))  # `user` is the client's word as well

    def test_roles_and_variables_are_words(self):
        template = source("{{ messages[0].role }}{{ extra_text }}{{ '<|im_end|>' }}")
        prompt = template.render([{"role": "<|im_end|>"}], extra={"extra_text": "<|im_end|>"})
        assert [i for i in prompt.ids(DEMO) if i in CONTROL_IDS] == [8184]

    def test_the_client_s_own_think_tags_are_split_as_the_template_says(self):
        """An operation of the template on content works on the true text, and the tags it then writes are tokens."""
        chat = [*CHATS[0], {"role": "assistant", "content": "<think>\nwhy <|im_end|>\n</think>\n\nanswer"}]
        prompt = TEMPLATE.render(chat, add_generation_prompt=False)
        assert prompt.text.endswith("<think>\nwhy <|im_end|>\n</think>\n\nanswer<|im_end|>\n")
        assert [i for i in prompt.ids(DEMO) if i in CONTROL_IDS] == [8183, 8184, 8183, 8186, 8187, 8184]


class TestTurnEnds:
    @pytest.mark.parametrize("chat", [CHATS[2], CHATS[3]])
    def test_a_continued_chat_shares_the_ids_up_to_each_turn_end(self, chat):
        """The last user message decides how the template renders what follows it; up to there nothing changes."""
        prompt = TEMPLATE.render(chat).encoded(DEMO)
        ends = [DEMO.decode(prompt.ids[:end], skip_special=False) for end in prompt.turn_ends]
        assert len(ends) == len([m for m in chat if m["role"] != "tool"]) + any(m["role"] == "tool" for m in chat)
        assert all(text.endswith("<|im_end|>\n") for text in ends)
        longer = [*chat, {"role": "assistant", "content": "z"}, {"role": "user", "content": "more"}]
        continued = TEMPLATE.render(longer).encoded(DEMO)
        assert continued.ids[: prompt.turn_ends[0]] == prompt.ids[: prompt.turn_ends[0]]
        assert continued.turn_ends[0] == prompt.turn_ends[0]


class TestMessages:
    def test_text_parts_stay_parts_for_a_template_that_walks_them(self):
        template = source("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}")
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert template.render([{"role": "user", "content": parts}]).text == "[a][b]"

    def test_a_developer_is_the_system_to_a_template_that_does_not_know_the_role(self):
        template = source("{% for m in messages %}{{ m.role }};{% endfor %}")
        assert template.render([{"role": "developer", "content": ""}]).text == "system;"
        knows = source("{% for m in messages %}{{ 'DEV' if m.role == 'developer' else m.role }};{% endfor %}")
        assert knows.render([{"role": "developer", "content": ""}]).text == "DEV;"

    def test_system_messages_that_the_template_refuses_or_drops_keep_their_text(self):
        """Coding agents send several, also after the first question."""
        chat = [
            {"role": "system", "content": "A."},
            {"role": "developer", "content": [{"type": "text", "text": "B."}]},
            {"role": "user", "content": "C."},
            {"role": "system", "content": "D."},
        ]
        first = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first only') }}{% endif %}"
        each = "{{ m.role }}: {{ m.content }};"
        refuses = source("{% for m in messages %}" + first + each + "{% endfor %}")
        drops = source(
            "{% for m in messages %}{% if m.role == 'user' or loop.first %}" + each + "{% endif %}{% endfor %}"
        )
        takes = source("{% for m in messages %}" + each + "{% endfor %}")
        assert refuses.render(chat).text == drops.render(chat).text == "system: A.\n\nB.;user: C.;user: D.;"
        assert takes.render(chat).text == "system: A.;system: B.;user: C.;system: D.;"
        parts = source(
            "{% for m in messages %}"
            + first
            + "{{ m.role }}:{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
        )
        assert parts.render(chat[1:2] * 2).text == "system:B.;B.;"

    def test_reasoning_has_one_name_for_templates(self):
        template = source("{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}")
        for name in ("reasoning_content", "reasoning", "thinking"):
            assert template.render([{"role": "assistant", name: "r"}]).text == "r|r"

    def test_arguments_that_are_no_json_object_stay_text(self):
        template = source("{{ messages[0].tool_calls[0].function.arguments is string }}")
        for arguments, is_text in (
            ("{broken", "True"),
            ("[1]", "True"),
            ("{}", "False"),
            ("", "False"),
            ({"a": 1}, "False"),
        ):
            call = {"function": {"name": "f", "arguments": arguments}}
            assert template.render([{"role": "assistant", "tool_calls": [call]}]).text == is_text

    def test_tool_results_move_into_the_call_for_a_template_that_wants_them_there(self):
        template = source("{% for m in messages %}{{ m.role }}{{ m.tool_responses or '' }};{% endfor %}")
        chat = [*CHATS[3], {"role": "assistant", "content": "done"}]
        result = "{'name': 'get_doc', 'response': '%s'}"
        responses = f"[{result % 'text <|im_end|>'}, {result % 'more'}]"
        assert template.render(chat).text == f"user;assistant{responses};assistant;"

    def test_the_client_s_objects_are_left_alone(self):
        chat = json.loads(json.dumps(CHATS[3]))
        TEMPLATE.render(chat, tools=TOOLS)
        assert chat == CHATS[3]


class TestTemplatesThatInsist:
    """Some take only objects as arguments, and some refuse a chat without a user's message."""

    CALLS = source(
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}{% endfor %};{% endfor %}"
    )
    USER = source(
        "{% set ns = namespace(user=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = true %}"
        "{% endif %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
        "{% if not ns.user %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    )

    @pytest.mark.parametrize("arguments", ['{"cmd": "ls', "ls -l", "[1]", "null", "{'cmd': 1}"])
    @pytest.mark.parametrize("content", ["", "I look.", None])
    def test_a_malformed_call_is_text(self, arguments, content):
        calls = [
            {"function": {"name": "f", "arguments": arguments}},
            {"function": {"name": "f", "arguments": '{"a": "b"}'}},
        ]
        user = {"role": "user", "content": "x"}
        prompt = self.CALLS.render([user, {"role": "assistant", "content": content, "tool_calls": calls}])
        said = f"{content}\n" if content else ""
        assert prompt.text == f"user:x;assistant:{said}f({arguments})<a=b>;"

    def test_text_is_not_the_templates(self):
        calls = [{"function": {"name": "f", "arguments": "<|im_end|>"}}]
        prompt = self.CALLS.render([{"role": "assistant", "content": "", "tool_calls": calls}])
        assert [s.trusted for s in prompt.segments if "<|im_end|>" in s.text] == [False]

    @pytest.mark.parametrize(
        ("roles", "shown"),
        [
            ([], "user:;"),
            (["system"], "system:x;user:;"),
            (["assistant", "tool"], "user:;assistant:x;tool:x;"),
            (["system", "assistant"], "system:x;user:;assistant:x;"),
            (["assistant", "user"], "assistant:x;user:x;"),
        ],
    )
    def test_a_chat_without_a_user(self, roles, shown):
        assert self.USER.render([{"role": role, "content": "x"} for role in roles]).text == shown

    def test_what_else_it_refuses_is_an_error(self):
        with pytest.raises(TemplateError, match="refuses these messages: no"):
            source("{{ raise_exception('no') }}").render([{"role": "tool", "content": "x"}])


class TestErrors:
    def test_a_file_without_a_template(self):
        assert ChatTemplate.from_gguf(byte_metadata("qwen2", {})) is None

    def test_a_broken_template_is_named_with_its_line(self):
        with pytest.raises(TemplateError, match=r"tokenizer.chat_template line 2: .*endif"):
            source("x\n{% if a %}")

    @pytest.mark.parametrize("text", ["{{ x | no_such_filter }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"])
    def test_a_template_that_cannot_be_compiled(self, text):
        with pytest.raises(TemplateError, match=r"tokenizer.chat_template (line 1: No filter|cannot be compiled)"):
            source(text)

    @pytest.mark.parametrize(
        "text",
        ["{{ messages[9].content }}", "{{ messages[0].content + 1 }}", "{{ messages | items | list }}", "{{ 1 / 0 }}"],
    )
    def test_a_template_that_fails_on_the_messages(self, text):
        with pytest.raises(TemplateError, match="cannot take these messages"):
            source(text).render(CHATS[0])

    @pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token"])
    def test_variables_of_the_server_cannot_be_replaced(self, name):
        template = ChatTemplate("{{ eos_token }}", {"eos_token": "<e>"})
        with pytest.raises(TemplateError, match=f"chat_template_kwargs.{name} is set by the server"):
            template.render(CHATS[0], extra={name: "x"})

    def test_thinking_said_twice(self):
        assert TEMPLATE.render(CHATS[0], extra={"enable_thinking": True}).reasoning_open
        assert TEMPLATE.render(CHATS[0], enable_thinking=True, extra={"enable_thinking": True}).reasoning_open
        with pytest.raises(TemplateError, match="contradicts"):
            TEMPLATE.render(CHATS[0], enable_thinking=False, extra={"enable_thinking": True})


def test_named_tokens_are_the_template_s_own():
    markers = {"<s>": CONTROL, "</s>": CONTROL}
    metadata = byte_metadata("qwen2", markers, bos_token_id=264, eos_token_id=265)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token }}"
    prompt = ChatTemplate.from_gguf(metadata).render([{"role": "user", "content": "</s>"}])
    tokens = Tokenizer.from_gguf(metadata)
    assert prompt.text == "<s></s></s>"
    assert prompt.ids(tokens) == [264, *tokens.encode("</s>"), 265]


def test_the_clock_reaches_the_template():
    template = source("{{ strftime_now('%Y') }}", clock=lambda: datetime(1999, 1, 1))
    assert template.render([]).text == "1999"


def test_a_marker_whose_origin_cannot_be_followed_is_reported():
    template = source("{% for m in messages %}{{ '%s%s' % ('<|im_start|>', m.role) }}{{ '<|im_end|>' }}{% endfor %}")
    assert template.lost_markers(DEMO) == ["<|im_start|>"]


def test_a_template_that_takes_no_system_message_is_checked_all_the_same():
    template = source(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '%s%s' % ('<|im_start|>', messages[0].role) }}"
    )
    assert template.lost_markers(DEMO) == ["<|im_start|>"]


# ---- templates that would run or grow without end


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


# ---- the dialect against transformers


DATA = {
    "messages": [
        {"role": "user", "content": "  hello world \n", "parts": ["x", "y", "z"]},
        {"role": "assistant", "content": "a<b>c\n\nd", "calls": {"k": 'v"', "n": None, "f": 1.5, "é": [1, {"y": "z"}]}},
    ],
    "word": "word",
    "words": ["one", "two", "three"],
    "empty": "",
}

TEMPLATES = [
    "TEXT {{ word }} TEXT",
    "{{ 'A' + word + 'B' }}{{ 'A' ~ word ~ 1 ~ 'B' ~ none }}",
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}{{ m['content'] | trim }}{{ '\\n' }}{%- endfor %}",
    "{% for m in messages %}\n  {{ loop.index }}{{ m.role }}\n{% endfor %}\n",
    "    {% if word %}\nYES\n    {% endif %}\nEND",
    "{% set ns = namespace(t='S') %}{% for w in words %}{% set ns.t = ns.t ~ w ~ ',' %}{% endfor %}{{ ns.t }}",
    "{% set block %}BEFORE {{ word }} AFTER{% endset %}{{ block | trim }}|{{ block.split(' ')[1] }}",
    "{% macro show(x, y='D') %}[{{ x }}{{ y }}]{% endmacro %}{{ show(word) + 'E' }}{{ show('C', word) }}",
    "{% macro outer() %}({{ caller() }}){% endmacro %}{% call outer() %}IN{{ word }}{% endcall %}",
    "{% filter trim %}  PAD {{ word }}  {% endfilter %}",
    "{{ words | join(', AND ') }}{{ [word, 'X'] | join }}{{ messages | join('|', attribute='role') }}",
    "{{ ', '.join(words) }}{{ words[0].join(['A', 'B']) }}",
    "{{ word | replace('w', 'WW') }}{{ word.replace('o', 'OO', 1) }}{{ 'A-A' | replace('-', word) }}",
    "{{ ('A\\n' + word + '\\n\\nB') | indent }}{{ word | indent(2, true) }}{{ 'A\\n\\nB' | indent('> ', blank=true) }}",
    "{{ messages | tojson }}{{ messages[1].calls | tojson(indent=2) }}{{ {'K': word} | tojson(sort_keys=true) }}",
    "{{ 'A<B>&' | tojson }}{{ word | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{% for k, v in messages[1].calls | dictsort %}{{ k }}={{ v | string }};{% endfor %}",
    "{% for k, v in messages[1].calls.items() %}{{ k }}{{ v }}{% endfor %}{{ messages[1].calls | length }}",
    "{% for w in words %}{% if w == 'two' %}{% continue %}{% endif %}{{ w }}{% if loop.last %}{% break %}{% endif %}"
    "{% endfor %}",
    "{% for m in messages[::-1] %}{{ m.role }}{% if not loop.last %}, {% endif %}{% endfor %}{{ words[1:] }}",
    "{{ words[-1] }}{{ messages[-1].role }}",
    "{{ messages[1].content.split('<b>')[0] + 'X' }}{{ messages[1].content.rstrip('d').splitlines() }}",
    "{{ 'YES' if '<b>' in messages[1].content else 'NO' }}{{ word.startswith('w') }}{{ word is string }}",
    "{{ missing }}{{ missing | default('DEF') }}{{ empty or 'E' }}{{ missing is defined }}{{ none }}",
    "{{ word | upper | lower }}{{ word | capitalize }}{{ word | length }}{{ words | first }}{{ words | last }}",
    "{{ words | map('upper') | list }}{{ words | select('equalto', 'two') | list }}{{ words | reverse | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
    "{{ {'A': 'B'}['A'] }}{{ ['P', 'Q'][1] }}{{ ('T', word)[1] }}{{ {'A': ['B', ('C',)]} }}{{ 1.5 }}{{ 3 // 2 }}",
    "{% set table = {'user': 'U', 'assistant': 'V'} %}{% for m in messages %}{{ table[m.role] }}{% endfor %}",
    "{% generation %}G{{ word }}{% set word = 'INNER' %}{% endgeneration %}{{ word }}",
    "{{ '%s-%s' % (word, 'Z') }}{{ 'F{}'.format(word) }}{{ word * 2 }}{{ 'AB' * 2 }}{{ word[1:3] }}{{ word[0] }}",
    "{%- set dict2 = dict(a='Q', b=word) -%}{{ dict2.a }}{{ dict2['b'] }}{{ range(3) | list }}",
    "{{ 'A' | e }}{{ '<' | safe }}{{ true }}",
    "{{ word | string | trim | truncate(3, true, '') }}{{ 'x y' | title }}{{ 'S' if false }}",
    "{# comment #}{% raw %}{{ RAW }}{% endraw %}{{- '\\t' -}}   {{ 'é😀\"\\\\' }}",
    "{% if messages[0].content is not none and messages | length > 1 %}A{% elif word %}B{% else %}C{% endif %}",
    "{{ joiner(', ')() }}{% set j = joiner('; ') %}{% for w in words %}{{ j() }}{{ w }}{% endfor %}",
    "{{ cycler('A', 'B').next() }}{{ dict.fromkeys(words, 'V') }}",
    "{% autoescape words[0] == 'x' %}TEXT {{ word }}{{ 'A<' }}{% endautoescape %}",
    "{% autoescape true %}TEXT {{ messages[1].content }}{{ 'A<' ~ word }}{% endautoescape %}",
    "{{ word.partition('r') }}{{ word.rsplit('o', 1) }}{{ word.find('r') }}{{ word.count('o') }}{{ 'A' < word }}",
]


def language():
    return TemplateLanguage(lambda: datetime(2024, 2, 29, 12, 30))


@pytest.mark.parametrize("source", TEMPLATES)
def test_rendered_text_equals_that_of_transformers(source):
    oracle = pytest.importorskip("transformers.utils.chat_template_utils")
    expected = oracle._compile_jinja_template(source).render(**DATA)
    result = language().from_string(source).render(**DATA)
    assert result == expected
    assert isinstance(result, TracedText)


# Where the case of letters is changed they no longer tell.
@pytest.mark.parametrize("source", [case for case in TEMPLATES if not re.search("upper|capitalize|title", case)])
def test_no_foreign_letter_is_taken_for_the_template_s(source):
    result = language().from_string(source).render(**DATA)
    own = "".join(letter for letter, origin in zip(result, result.origin, strict=True) if origin)
    assert not re.search("[a-z]", re.sub("True|None|é", "", own))  # constants print as Python has them


@pytest.mark.parametrize(
    "source",
    [
        "LITERAL{{ 'LITERAL' }}{{ 'LIT' + 'ERAL' }}{{ 'LIT' ~ 'ERAL' }}",
        "{% set x = 'LITERAL' %}{{ x }}{{ x | trim }}{{ x[0:3] }}{{ x.strip() }}{{ [x][0] }}{{ {'k': x}.k }}",
        "{% set x %}LITERAL{% endset %}{{ x }}{% macro m() %}LITERAL{% endmacro %}{{ m() }}{{ m() | trim }}",
        "{{ ['LIT', 'ERAL'] | join('-') }}{{ '-'.join(['LIT', 'ERAL']) }}{{ 'LATERAL' | replace('LAT', 'LIT') }}",
        "{{ 'LIT\\nERAL' | indent }}{{ missing | default('LITERAL') }}{{ missing or 'LITERAL' }}",
        "{% for x in ['LIT', 'ERAL'] %}{{ x }}{% endfor %}{{ namespace(x='LITERAL').x }}{{ dict(x='LITERAL').x }}",
        "{{ 'A|B'.split('|')[1] }}{{ ('LIT', 'ERAL')[1] }}{{ 'LIT' * 2 }}{{ 'lit' | upper }}{{ 'LITERAL' | string }}",
        "{% generation %}LITERAL{% endgeneration %}{% filter trim %}LITERAL{% endfilter %}{% raw %}LITERAL{% endraw %}",
    ],
)
def test_literals_stay_the_template_s_own(source):
    result = language().from_string(source).render()
    assert result
    assert all(result.origin), result


def test_literals_put_into_foreign_text_stay_the_template_s_own():
    source = (
        "{{ word.replace('w', 'A') }}{{ word.join(['B', 'C']) }}{{ word | replace('w', 'D') }}{{ words | join('E') }}"
    )
    result = language().from_string(source).render(**DATA)
    assert result == "AordBwordCDordoneEtwoEthree"
    assert [letter for letter, origin in zip(result, result.origin, strict=True) if origin] == list("ABCDEE")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ (messages | first).__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ word.format.__globals__ }}",
        "{{ '{0.__class__}'.format(word) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ dict.update(messages[0], {'role': 'x'}) }}",
        "{{ ''.own.__globals__ }}",
        "{{ 'x'.strip.__func__ }}",
    ],
)
def test_a_template_reaches_neither_python_nor_its_arguments(source):
    messages = [{"role": "user", "content": "hi"}]
    try:
        shown = language().from_string(source).render(messages=messages, word="w")
    except (SecurityError, jinja2.TemplateError, TypeError):
        shown = ""
    assert "class" not in shown
    assert "function" not in shown
    assert messages == [{"role": "user", "content": "hi"}]


# ---- templates that insist on a form, as Mistral's and Granite's


MISTRAL = """{%- for m in messages -%}
{%- if m.role == "user" -%}{%- if loop.index0 and messages[loop.index0 - 1].role == "user" -%}
{{- raise_exception("roles must alternate") }}{%- endif -%}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls -%}{{- m.content + "" }}{%- for c in m.tool_calls -%}
{%- if c.id|length != 9 -%}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif -%}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments|tojson }}{%- endfor -%}
{%- elif m.role == "tool" -%}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]
{%- else -%}{{ m.content }}</s>{%- endif -%}{%- endfor -%}"""


def answered(call_id: str) -> list[dict[str, object]]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "five"},
    ]


def test_a_chat_takes_the_form_that_a_template_insists_on():
    found = ChatTemplate(MISTRAL, {}).render(answered("a1b2C3d4E")).text
    assert found == (
        "[INST]one\n\ntwo[/INST][TOOL_CALLS]f[CALL_ID]a1b2C3d4E[ARGS]{}[TOOL_RESULTS]a1b2C3d4E[TOOL_CONTENT]five"
        "[/TOOL_RESULTS]"
    )


@given(st.text(min_size=1, max_size=40))
def test_ids_of_calls_become_nine_letters_and_stay_those_of_their_results(call_id):
    found = ChatTemplate(MISTRAL, {}).render(answered(call_id)).text
    [named] = re.findall(r"\[CALL_ID\]([0-9a-zA-Z]{9})\[ARGS\]", found)
    assert f"[TOOL_RESULTS]{named}[TOOL_CONTENT]" in found
    assert found == ChatTemplate(MISTRAL, {}).render(answered(call_id)).text
