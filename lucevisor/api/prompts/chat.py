"""The body of a chat completion request as options and token ids.

Knows the endpoint's parameters and the model's chat template.  Invariant: a parameter that the template cannot honour
is refused by name, never dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.api.prompts.checks import (
    check_choices,
    check_common,
    check_least,
    check_length,
    check_stop_ids,
    check_tokens,
    limit_of,
)
from lucevisor.api.prompts.constraint import output_grammar, requested_calls, requested_form
from lucevisor.api.prompts.decoding import ignored, to_record
from lucevisor.api.prompts.messages import check_messages, check_tools, custom_names
from lucevisor.api.prompts.sampling import budget_of, n_top_logprobs, random_seed, sampling_params
from lucevisor.api.prompts.schemas import ChatBody
from lucevisor.errors import show
from lucevisor.text.preamble import normalised
from lucevisor.text.template import ChatTemplate, EncodedPrompt, RenderedPrompt, TemplateError


def read_chat(fields: dict[str, Any], ports: Ports) -> PreparedRequest:
    """Prepare the request in a decoded body; raises ApiError naming the parameter at fault."""
    body = _read_body(fields, ports)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_parameter("top_logprobs", "is given without logprobs; send logprobs: true as well")
    template = _template(ports)
    tools, choice = check_tools(body.tools or [], body.tool_choice)
    messages = normalised(check_messages(body.messages), ports.settings.normalise)
    form = requested_form(body)
    calls = requested_calls(tools, choice, form, parallel=body.parallel_tool_calls is not False)
    prompt = _render(body, messages, tools, template)
    tags = None if prompt.answering else template.output_format.reasoning_after(prompt.text)
    encoded = _encoded(prompt, ports)
    n_top = n_top_logprobs(body, (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
    grammar = output_grammar(form, ports, tags, inside=prompt.reasoning_open, calls=calls)
    structured = bool(tools) or grammar is not None
    max_tokens = _max_tokens(body)
    options = GenerationOptions(
        sampling=sampling_params(body, ports, random_seed(), n_top, direct=tags is None, structured=structured),
        turn_ends=[encoded.turn_ends],
        roles=[[str(message["role"]) for message in messages]],
        max_tokens=max_tokens,
        min_tokens=check_least(body, max_tokens),
        n=check_choices(body.n, 1),
        ignore_eos=bool(body.ignore_eos),
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        stop_ids=check_stop_ids(body, ports),
        ignored=ignored(ChatBody, fields, more=_unused(body, template)),
        grammar=grammar,
        max_thinking_tokens=None if tags is None else _thinking_budget(body, ports, template),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=n_top >= 0,
        tools=tools,
        custom=custom_names(body.tools or []),
        reasoning_open=prompt.reasoning_open,
        show_reasoning=body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude),
        one_tool_call=body.parallel_tool_calls is False,
    )
    return PreparedRequest(options, [tuple(encoded.ids)])


def read_apply_template(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the response of /apply-template: the prompt that a chat request would be answered for, as text."""
    prompt = _prompt_only(fields, ports)
    check_length(prompt.text, "messages", ports)
    return msgspec.json.encode({"prompt": prompt.text})


def count_prompt(fields: dict[str, Any], ports: Ports) -> int:
    """Return how many tokens the prompt of a chat request has, also beyond the context."""
    return len(_encoded(_prompt_only(fields, ports), replace(ports, max_context=0)).ids)


def _prompt_only(fields: dict[str, Any], ports: Ports) -> RenderedPrompt:
    """Return the prompt of a chat request, without the form of its answer, which takes time to compile."""
    body = _read_body(fields, ports)
    tools, _ = check_tools(body.tools or [], body.tool_choice)
    messages = normalised(check_messages(body.messages), ports.settings.normalise)
    return _render(body, messages, tools, _template(ports))


def _read_body(fields: dict[str, Any], ports: Ports) -> ChatBody:
    """Return the checked body, with what objects say of thinking in the parameters that say the same."""
    body = to_record(ChatBody, fields)
    check_common(body, ports)
    if body.max_thinking_tokens == -1:
        body.max_thinking_tokens = None
    source = "" if ports.template is None else ports.template.source
    switch = "enable_thinking" in source
    wishes: list[tuple[bool | None, int | None]] = []
    if (reasoning := body.reasoning) is not None:
        budget = reasoning.max_tokens
        if switch or "reasoning_effort" in source:
            body.reasoning_effort = body.reasoning_effort or reasoning.effort
        elif budget is None and reasoning.effort is not None:
            budget = budget_of(reasoning.effort, ports)
        wishes.append((reasoning.enabled, budget))
    if (thinking := body.thinking) is not None:
        wish = {"enabled": True, "disabled": False}.get(thinking.type)
        wishes.append((wish, thinking.budget_tokens if wish else None))
    for wish, budget in wishes:
        if body.max_thinking_tokens is None:
            body.max_thinking_tokens = budget if wish is not False or switch else 0
        if body.enable_thinking is None and switch:
            body.enable_thinking = wish
    return body


def _template(ports: Ports) -> ChatTemplate:
    if ports.template is None:
        raise ApiError(
            400, "the model's file has no chat template; use /v1/completions", code="no_chat_template", param="model"
        )
    return ports.template


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_parameter("max_completion_tokens", f"{new} contradicts max_tokens = {old}; send one of them")
    n_tokens = old if new is None else new
    if n_tokens == 0:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise bad_parameter(name, "0 leaves no room for an answer; send 1 or more, or -1 for no limit")
    return limit_of(n_tokens)


def _thinking_budget(body: ChatBody, ports: Ports, template: ChatTemplate) -> int | None:
    if body.max_thinking_tokens is not None or "reasoning_effort" in template.source:
        return body.max_thinking_tokens
    return budget_of(body.reasoning_effort or "", ports)


def _render(
    body: ChatBody, messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: ChatTemplate
) -> RenderedPrompt:
    """Return the prompt; raises ApiError naming the parameter at fault."""
    if tools and (template.output_format.tools is None or "tools" not in template.source):
        raise bad_parameter(
            "tools", "the model's chat template does not support tools; leave them out", "unsupported_parameter"
        )
    extra = {name: value for name, value in (body.chat_template_kwargs or {}).items() if name in template.source}
    if body.reasoning_effort is not None and "reasoning_effort" in template.source:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    continued = _continues(body, messages)
    try:
        return template.render(
            messages,
            tools=tools,
            enable_thinking=_thinking(body, template),
            add_generation_prompt=body.add_generation_prompt is not False,
            extra=extra,
            continued=continued,
        )
    except TemplateError as error:
        param = "chat_template_kwargs" if str(error).startswith("chat_template_kwargs") else "messages"
        raise ApiError(400, str(error), code="template_error", param=param) from None


def _unused(body: ChatBody, template: ChatTemplate) -> list[str]:
    """Return the variables for the template that it does not use."""
    return [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {} if name not in template.source]


def _continues(body: ChatBody, messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is the beginning of the answer."""
    last = messages[-1]
    if body.continue_final_message:
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise bad_parameter("continue_final_message", "true needs a last message of the assistant's without calls")
        return True
    asked = body.continue_final_message is None and body.add_generation_prompt is not False
    return asked and last["role"] == "assistant" and not last.get("tool_calls")


def _encoded(prompt: RenderedPrompt, ports: Ports) -> EncodedPrompt:
    check_length(prompt.text, "messages", ports)
    encoded = prompt.encoded(ports.tokenizer)
    check_tokens(len(encoded.ids), "messages", ports)
    return encoded


def _thinking(body: ChatBody, template: ChatTemplate) -> bool | None:
    """Return whether the model should think (None: the template's default); raises ApiError if it cannot be set."""
    wish, param = body.enable_thinking, "enable_thinking"
    if body.reasoning_effort is not None:
        by_effort = body.reasoning_effort not in ("none", "minimal")
        if wish is not None and wish != by_effort:
            raise bad_parameter(
                "reasoning_effort", f"{show(body.reasoning_effort)} contradicts enable_thinking; send one of them"
            )
        wish, param = by_effort, "reasoning_effort"
    if wish is None or "enable_thinking" in template.source:
        return wish
    if wish and not (param == "reasoning_effort" and param in template.source):
        raise bad_parameter(
            param, "the model's chat template cannot switch thinking on; leave it out", "unsupported_value"
        )
    if not wish and param == "enable_thinking" and template.output_format.reasoning is not None:
        raise bad_parameter(
            param,
            "the model's chat template cannot switch thinking off; leave it out, or send max_thinking_tokens: 0",
            "unsupported_value",
        )
    return None
