"""Whatever the bytes, a body becomes a record or an ApiError that names the parameter."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.api.contexts import ModelCard, ModelContext, SamplingDefaults
from lucevisor.api.dialects.openai_chat import ChatBody
from lucevisor.api.dialects.openai_completions import CompletionBody
from lucevisor.api.dialects.openai_responses import ResponsesBody
from lucevisor.api.errors import ApiError, from_request_error, from_submit_error
from lucevisor.api.parameters import n_top_logprobs, sampling_params, seed_of_choice
from lucevisor.api.schemas import NEUTRAL, REFUSED, GenerationBody, decode_object, ignored, to_record
from lucevisor.engine.request import ContextOverflow, InvalidRequest, NotReady, QueueFull, RequestError, SubmitError
from lucevisor.protocol.steps import Mirostat
from lucevisor.text.tokenizer import breaker_tokens
from tests.api.scripted_model import tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def refused(kind, fields):
    with pytest.raises(ApiError) as caught:
        to_record(kind, fields)
    assert caught.value.status == 400
    assert caught.value.param is None or caught.value.message.startswith(caught.value.param)
    return caught.value


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"mirostat": 3}, "mirostat: 3 is not one of its values; use 0, 1, 2"),
        (
            {"reasoning_effort": "huge"},
            'reasoning_effort: "huge" is not one of its values; use high, low, max, medium,',
        ),
        ({"input": "", "reasoning": {"effort": "huge"}}, 'reasoning.effort: "huge" is not one of its values; use high'),
    ],
)
def test_a_value_that_is_none_of_a_list_is_told_with_the_list(more, told):
    kind, fields = (ResponsesBody, more) if "input" in more else (ChatBody, CHAT | more)
    assert refused(kind, fields).message.startswith(told)


class TestTextThatNoUtf8Holds:
    """JSON can escape half of a surrogate pair, and a body can hold any bytes: the parameter is named, as msgspec's
    message misleads."""

    @pytest.mark.parametrize(
        ("raw", "param"),
        [
            (b'{"prompt":"Hi \\ud800"}', "prompt"),
            (b'{"prompt":["Hi","\\uDfFf!"]}', "prompt[1]"),
            (b'{"prompt":"Hi \xed\xa0\x80"}', "prompt"),
            (b'{"messages":[{"content":"\\ud83d\\ude00"},{"content":"\\ude00\\ud83d"}]}', "messages[1].content"),
            (b'{"a":{"b":[1,{"c \\udc00":2}]}}', "a.b[1]"),
            (b'{"\\udc00":2}', "body"),
            (b'["\\ud800"]', "[0]"),
            (b'"\\ud800"', "body"),
            (b'{"' + b"x" * 500 + b'":"\\ud800"}', "x" * 80 + "…"),
            (b'{"prompt":["caf\xc3\xa9","caf\xe9"]}', "prompt[1]"),
            (b'{"messages":[{"content":"cut \xf0\x9f\x98"}]}', "messages[0].content"),
            (b'{"a":{"\x80":1}}', "a"),
            (b'{"a":"\xff\xed\xa0\x80"}', "a"),
        ],
    )
    def test_are_told_with_their_place(self, raw, param):
        with pytest.raises(ApiError) as caught:
            decode_object(raw)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert caught.value.message.startswith(f"{param}: holds bytes that are not UTF-8, or half of a surrogate pair")

    @pytest.mark.parametrize(
        "raw",
        [
            b'{"a":"\\ud800"',
            b'{"a":"\xff"',
            b"\xff\xfe{\x00}\x00",
            b'{"a":"\\ud800',
            b'{"a":' * 900 + b'"\\ud800"' + b"}" * 900,
        ],
    )
    def test_what_is_no_json_either_is_told_as_that(self, raw):
        with pytest.raises(ApiError) as caught:
            decode_object(raw)
        assert caught.value.code == "invalid_json"

    def test_pairs_are_taken(self):
        assert decode_object(b'{"a":"\\ud83d\\ude00 \\\\ud800"}') == {"a": "\U0001f600 \\ud800"}


class TestValues:
    def test_null_is_the_default(self):
        names = [f.name for f in msgspec.structs.fields(ChatBody) if f.name != "messages"]
        assert to_record(ChatBody, CHAT | dict.fromkeys(names)) == to_record(ChatBody, CHAT)

    @pytest.mark.parametrize(
        ("param", "value"),
        [
            ("temperature", 2.1),
            ("temperature", -0.1),
            ("temperature", "warm"),
            ("temperature", True),
            ("top_p", 1.5),
            ("top_k", -2),
            ("top_k", 1.5),
            ("min_p", -1),
            ("n", 0),
            ("n", 129),
            ("max_tokens", -2),
            ("max_tokens", 10**30),
            ("max_completion_tokens", -2),
            ("seed", 2**63),
            ("seed", "1"),
            ("stop", 5),
            ("stop", ""),
            ("presence_penalty", 3),
            ("frequency_penalty", -3),
            ("repetition_penalty", 0),
            ("logprobs", 1),
            ("top_logprobs", 21),
            ("stream", "yes"),
            ("ignore_eos", 1),
            ("messages", "Hi"),
            ("messages", None),
            ("tools", {}),
            ("reasoning_effort", "extreme"),
            ("chat_template_kwargs", []),
        ],
    )
    def test_a_wrong_value_names_its_parameter(self, param, value):
        error = refused(ChatBody, CHAT | {param: value})
        assert error.param == param
        assert error.code == "invalid_value"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"stop": ["a", ""]}, "stop[1]"),
            ({"stop": ["a"] * 17}, "stop"),
            ({"stop": ["a", 3]}, "stop[1]"),
            ({"messages": ["Hi"]}, "messages[0]"),
            ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
            ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
            ({"response_format": {}}, "response_format.type"),
        ],
    )
    def test_a_path_inside_a_parameter(self, fields, param):
        assert refused(ChatBody, CHAT | fields).param == param

    def test_a_required_parameter(self):
        error = refused(ChatBody, {})
        assert (error.param, error.code) == ("messages", "missing_required_parameter")
        assert refused(CompletionBody, {}).param == "prompt"


OTHER_SERVERS = [
    *("cache_salt", "chat_template", "documents", "kv_transfer_params", "mm_processor_kwargs", "request_id"),
    *("prompt_logprobs", "truncate_prompt_tokens", "return_tokens_as_token_ids", "add_special_tokens", "vllm_xargs"),
    *("n_keep", "n_discard", "samplers", "min_keep", "t_max_predict_ms", "return_progress"),
    *("post_sampling_probs", "lora", "repeat_last_n", "dynatemp_exponent", "input_audio", "separate_reasoning"),
    *("provider", "transforms", "route", "usage", "plugins", "keep_alive", "extra_body", "drop_params"),
]
"""Parameters that clients of vLLM, llama.cpp, SGLang, Ollama and routers send."""


class TestOtherParameters:
    def test_an_unknown_one_is_refused_with_the_nearest(self):
        error = refused(ChatBody, CHAT | {"temprature": 1})
        assert (error.param, error.code) == ("temprature", "unknown_parameter")
        assert "did you mean temperature?" in error.message

    @pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
    def test_an_unknown_one_of_another_client_is_ignored_and_named(self, kind):
        required = CHAT if kind is ChatBody else {"prompt": "x"}
        sent = dict.fromkeys(OTHER_SERVERS, 1)
        assert to_record(kind, required | sent) == to_record(kind, required)
        assert ignored(kind, required | sent) == tuple(sorted(OTHER_SERVERS))
        assert ignored(kind, required | dict.fromkeys(OTHER_SERVERS)) == ()

    def test_null_is_as_absent_even_if_it_is_misspelt(self):
        assert to_record(ChatBody, CHAT | {"temprature": None}) == to_record(ChatBody, CHAT)

    @pytest.mark.parametrize("empty", [[], {}, "", False, None])
    def test_a_refused_one_that_asks_for_nothing_is_ignored(self, empty):
        assert to_record(ChatBody, CHAT | {"functions": empty}) == to_record(ChatBody, CHAT)

    def test_an_unknown_one_inside(self):
        error = refused(ChatBody, CHAT | {"stream_options": {"includ_usage": True}})
        assert error.param == "stream_options.includ_usage"
        assert "did you mean include_usage?" in error.message

    def test_llama_cpp_names_are_obeyed(self):
        assert to_record(ChatBody, CHAT | {"repeat_penalty": 1.5, "n_predict": 7}) == to_record(
            ChatBody, CHAT | {"repetition_penalty": 1.5, "max_tokens": 7}
        )
        error = refused(ChatBody, CHAT | {"repeat_penalty": -1})
        assert error.param == "repeat_penalty"
        assert error.message.startswith("repeat_penalty: ")
        assert refused(ChatBody, CHAT | {"n_predict": 7, "max_tokens": 8}).param == "max_tokens"

    @pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"messages"}))
    def test_refused_ones_are_named_unless_null(self, name):
        error = refused(ChatBody, CHAT | {name: "anything"})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        to_record(ChatBody, CHAT | {name: None})

    @pytest.mark.parametrize("name", sorted(NEUTRAL))
    def test_neutral_values_only(self, name):
        to_record(ChatBody, CHAT | {name: NEUTRAL[name][0]})
        to_record(ChatBody, CHAT | {name: None})
        assert refused(ChatBody, CHAT | {name: "other"}).param == name

    def test_no_table_hides_a_parameter_that_is_supported(self):
        known = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
        elsewhere = {"messages", "prompt", "suffix"}  # of one endpoint, refused by name at the other
        assert known & (REFUSED.keys() | NEUTRAL.keys()) == elsewhere

    def test_no_parameter_of_the_openai_client_counts_as_misspelt(self):
        from openai.types import completion_create_params as plain
        from openai.types.chat import completion_create_params as chat

        for kind, least, names in (
            (ChatBody, CHAT, chat.CompletionCreateParamsBase.__annotations__),
            (CompletionBody, {"prompt": "x"}, plain.CompletionCreateParamsBase.__annotations__),
        ):
            others = names.keys() - {*kind.__struct_fields__, *REFUSED, *NEUTRAL}
            assert others
            to_record(kind, least | dict.fromkeys(others, "x"))


# ---- sampling parameters and defaults


CONTEXT = ModelContext(
    model=ModelCard(name="m", created_s=0), tokenizer=tokenizer(), template=None, banned=(8190, 8191)
)


@pytest.mark.parametrize("value", ["0.5", True, None, -1.0, 3.0, float("nan"), [0.5]])
def test_a_broken_default_of_the_file_is_left_out(value):
    assert SamplingDefaults.from_gguf({"general.sampling.temp": value}) == SamplingDefaults()


@pytest.mark.parametrize(("asked", "given"), [(0.0, 0.0), (4e-113, 0.0), (9e-5, 0.0), (1e-4, 1e-4), (2.0, 2.0)])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(asked, given):
    assert sampling_params(GenerationBody(temperature=asked), CONTEXT, 0, -1).temperature == given


def test_minus_one_switches_top_k_off():
    assert sampling_params(GenerationBody(top_k=-1), CONTEXT, 0, -1).top_k == 0


def test_samplers_of_llama_cpp_arrive():
    body = GenerationBody(
        typical_p=0.5,
        top_n_sigma=1.5,
        xtc_probability=0.25,
        dry_multiplier=0.8,
        dry_allowed_length=3,
        dry_sequence_breakers=["\n"],
        mirostat=2,
        mirostat_tau=4.0,
    )
    sampling = sampling_params(body, CONTEXT, 0, -1)
    assert (sampling.typical_p, sampling.top_n_sigma) == (0.5, 1.5)
    assert (sampling.xtc_probability, sampling.xtc_threshold) == (0.25, 0.1)
    assert sampling.mirostat == Mirostat(2, 4.0, 0.1)
    assert sampling.dry is not None
    assert (sampling.dry.multiplier, sampling.dry.base, sampling.dry.allowed_length) == (0.8, 1.75, 3)
    heads = {tokenizer().token_bytes(head) for head, *tail in sampling.dry.breakers if not tail}
    assert b"\n" in heads
    assert all(b"\n" in word for word in heads)


@pytest.mark.parametrize(
    "off",
    [{"mirostat": 0}, {"dry_multiplier": 0.0, "dry_base": 2.0}, {"dry_multiplier": 1.0, "dry_penalty_last_n": 0},
     {"typical_p": 1.0}, {"xtc_probability": 0.0}, {"top_n_sigma": -1.0}],
)  # fmt: skip
def test_values_that_switch_a_sampler_off(off):
    assert sampling_params(GenerationBody(**off), CONTEXT, 7, -1) == sampling_params(GenerationBody(), CONTEXT, 7, -1)


def test_a_breaker_over_several_tokens_has_a_head_and_a_tail():
    found = breaker_tokens(tokenizer(), ("ab:",))
    words = [[tokenizer().token_bytes(token) for token in one] for one in found]
    assert [b"a", b"b", b":"] in words
    assert all(b"".join(one).endswith(b"ab:") or b"ab:" in one[0] for one in words)


def test_breakers_that_are_everywhere_are_refused(monkeypatch):
    monkeypatch.setattr("lucevisor.text.tokenizer.MAX_BREAKER_SEQUENCES", 100)
    with pytest.raises(ApiError, match="dry_sequence_breakers: the breakers are in"):
        sampling_params(GenerationBody(dry_multiplier=1.0, dry_sequence_breakers=["e"]), CONTEXT, 0, -1)


@pytest.mark.parametrize(
    ("n_probs", "wanted", "result"), [(None, None, -1), (0, None, -1), (0, 4, 4), (3, None, 3), (3, 3, 3)]
)
def test_n_probs_is_another_name_of_logprobs(n_probs, wanted, result):
    assert n_top_logprobs(GenerationBody(n_probs=n_probs), wanted, "logprobs") == result


def test_n_probs_that_contradict_logprobs():
    with pytest.raises(ApiError, match="n_probs: 3 contradicts top_logprobs = 5"):
        n_top_logprobs(GenerationBody(n_probs=3), 5, "top_logprobs")


@pytest.mark.parametrize("key", ["", "x", "-1", "+1", " 1", "1.0", "8192", "1_0", "٣", "9" * 5000])
def test_a_bias_that_names_no_token(key):
    with pytest.raises(ApiError) as caught:
        sampling_params(GenerationBody(logit_bias={key: 1.0}), CONTEXT, 0, -1)
    assert caught.value.status == 400
    assert str(caught.value.param).startswith("logit_bias")
    assert len(caught.value.message) < 300


@given(st.integers(-(2**63), 2**63 - 1))
def test_seeds_of_choices_are_distinct_and_fit_64_bits(seed):
    seeds = [seed_of_choice(seed, i) for i in range(5)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 5
    assert all(-(2**63) <= s < 2**63 for s in seeds)


# ---- status, type and code of every end


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "retry"),
    [
        (QueueFull(8, 2, 16, 7), 429, "queue_full", None, "7"),
        (NotReady("group left is away"), 503, "not_ready", None, "5"),
        (ContextOverflow(9, 8, 64), 400, "context_length_exceeded", "messages", None),
        (InvalidRequest("prompt", "is empty"), 400, "invalid_request", "messages", None),
        (InvalidRequest("max_tokens", "is 0"), 400, "invalid_request", "max_tokens", None),
        (SubmitError("odd"), 500, "refused", None, None),
    ],
)
def test_refusals(error, status, code, param, retry):
    told = from_submit_error(error, "messages", 5)
    assert (told.status, told.code, told.param, told.headers.get("Retry-After")) == (status, code, param, retry)
    assert error.message in told.message


@pytest.mark.parametrize(("code", "status"), [("shard_lost", 503), ("shutting_down", 503), ("protocol_error", 500)])
def test_ends_of_running_requests(code, status):
    told = from_request_error(RequestError(code, "why"), 3)
    assert (told.status, told.code, told.message, told.type) == (status, code, "why", "server_error")
    assert told.headers == ({"Retry-After": "3"} if status == 503 else {})
