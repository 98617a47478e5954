"""Structured outputs (guided decoding): translates response formats, schemas and tool choices into one grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from lucevisor.api.contexts import ModelContext
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.prepared import OutputGrammar
from lucevisor.api.schemas import GenerationBody, JsonSchemaFormat, ResponseFormat, ToolChoice
from lucevisor.errors import show
from lucevisor.text.grammar import forms
from lucevisor.text.grammar.forms import Part
from lucevisor.text.grammar.matcher import Grammar
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.reasoning import ReasoningTags, after_reasoning
from lucevisor.text.tools import Function, ToolFormat, Tools
from lucevisor.text.tools.call import MAX_CALLS, calls_in_text, calls_only, functions, without_schemas

MAX_OPTIONS: Final = 1024
"""Texts of a choice."""

FIELDS: Final = frozenset(
    [
        *("response_format", "structured_outputs", "grammar", "json_schema", "regex"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("text", "output_config", "output_format"),  # of the Responses and Messages API
    ]
)
"""Parameters that may constrain the output."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """A required form of the output, and the request parameter that requires it."""

    param: str
    part: Part


@dataclass(frozen=True, slots=True)
class CallConstraint:
    """Tool calls that an answer may contain.  ``required``: the answer is 1 to ``max_calls`` calls and nothing else."""

    param: str
    offered: Sequence[Function]
    max_calls: int
    required: bool = False


def constrains(fields: Mapping[str, object]) -> bool:
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if choice not in (None, "auto", "none") or (isinstance(tools, list) and any(map(_is_strict, tools))):
        return True
    return any(fields.get(name) is not None for name in FIELDS)


def _is_strict(tool: object) -> bool:
    if not isinstance(tool, Mapping):
        return False
    inner = tool.get("tools")  # of a namespace
    asked = (tool, tool.get("function"), *(inner if isinstance(inner, list) else ()))
    return any(isinstance(item, Mapping) and item.get("strict") for item in asked)


def requested_form(body: GenerationBody) -> OutputForm | None:
    """Return the output form that a body requires, or None.  Raises ApiError naming the parameter at fault."""
    found = [form for form in (_response_format(body.response_format), *_plain_forms(body)) if form is not None]
    if len(found) > 1:
        raise bad_parameter(found[1].param, f"is given together with {found[0].param}; send one of them")
    if found and body.ignore_eos:
        raise bad_parameter(
            "ignore_eos", f"contradicts {found[0].param}: a constrained answer ends where its form is complete"
        )
    return found[0] if found else None


def requested_calls(tools: Tools, choice: object, form: OutputForm | None, *, parallel: bool) -> CallConstraint | None:
    """Return the constraint on tool calls: if they are required, if an output form is set as well, or if a tool is
    strict."""
    if isinstance(choice, ToolChoice) and choice.function is not None:
        return CallConstraint("tool_choice", functions(tools, [choice.function.name]), 1, required=True)
    offered, max_calls = functions(tools), MAX_CALLS if parallel else 1
    if choice == "required":
        return CallConstraint("tool_choice", offered, max_calls, required=True)
    if offered and (form is not None or any(item.strict for item in offered)):
        return CallConstraint("tools", offered, max_calls)
    return None


def output_grammar(
    form: OutputForm | None,
    ctx: ModelContext,
    tags: ReasoningTags | None = None,
    *,
    inside: bool = False,
    calls: CallConstraint | None = None,
) -> OutputGrammar | None:
    """Return the checked grammar of an answer, None if nothing constrains it; raises ApiError if it does not compile.
    ``tags``: those of the model's reasoning if it may come first; ``inside``: the prompt ends inside it."""
    rules = Rules(ctx.tokenizer)
    tool_format = ctx.template.output_format.tools if ctx.template is not None else None
    header = rules.text(tags.answer) if tags is not None else ""
    if calls is not None and tool_format is not None:
        try:
            start = _with_calls(rules, tool_format, calls, form, header)
        except GrammarError as error:
            raise _invalid_grammar(calls.param, error) from None
        param = calls.param if form is None or calls.required else form.param
    elif form is not None:
        start, param = f"{header} {rules.part(form.part)}", form.param
    else:
        return None
    if form is not None or header or (calls is not None and calls.required):
        start = after_reasoning(rules, start, tags, inside=inside)
    grammar = OutputGrammar(grammar=rules.grammar(start), param=param)
    try:
        compiled(grammar, ctx)
    except ApiError:
        # Tools that are not strict may be too much, alone or together.
        if calls is None or (offered := without_schemas(calls.offered)) == list(calls.offered):
            raise
        return output_grammar(form, ctx, tags, inside=inside, calls=replace(calls, offered=offered))
    return grammar


def _with_calls(
    rules: Rules, tool_format: ToolFormat, calls: CallConstraint, form: OutputForm | None, header: str
) -> str:
    """``header``: an expression for what the text of an answer begins with; then calls and text exclude each other."""
    if not calls.required and form is None and not header:
        return calls_in_text(rules, tool_format, calls.offered)
    only = calls_only(rules, tool_format, calls.offered, n_most=calls.max_calls)
    if calls.required:
        return only
    text = rules.without(tool_format.open) if form is None else rules.part(form.part)
    return f"({only} | {header} {text})"


def compiled(grammar: OutputGrammar, ctx: ModelContext) -> Grammar:
    """Return a grammar ready for use; raises ApiError 400 with llguidance's message."""
    try:
        return ctx.grammars.compile(grammar.grammar)
    except GrammarError as error:
        raise _invalid_grammar(grammar.param, error) from None


def schema_form(schema: Mapping[str, Any] | None, param: str, *, strict: bool) -> OutputForm:
    """Return the form of JSON by a schema; None: any object. ``strict``: refuse keywords that cannot be enforced.
    Raises ApiError."""
    try:
        return OutputForm(
            param, forms.any_object() if schema is None else forms.json_schema(schema, lenient=not strict)
        )
    except GrammarError as error:
        raise _invalid_grammar(param, error) from None


def _response_format(format_: ResponseFormat | None) -> OutputForm | None:
    if format_ is None or format_.type == "text":
        return None
    if format_.type == "json_object":
        return schema_form(format_.schema, "response_format", strict=True)
    if format_.type != "json_schema":
        raise bad_parameter(
            "response_format.type",
            f"{show(format_.type)} is not supported; use text, json_object or json_schema",
            "unsupported_value",
        )
    given = format_.json_schema or JsonSchemaFormat(schema=format_.schema, strict=True)
    if given.schema is None:
        raise bad_parameter(
            "response_format.json_schema.schema", "is missing; it is required", "missing_required_parameter"
        )
    return schema_form(given.schema, "response_format", strict=bool(given.strict))


def _plain_forms(body: GenerationBody) -> list[OutputForm | None]:
    more = body.structured_outputs
    forms_ = [
        _form("guided_json", body.guided_json, _json),
        _form("json_schema", body.json_schema, _json),
        _form("guided_regex", body.guided_regex, forms.regex),
        _form("regex", body.regex, forms.regex),
        _form("guided_choice", body.guided_choice, _choice),
        _form("guided_grammar", body.guided_grammar, forms.grammar),
        _form("grammar", body.grammar or None, forms.grammar),
    ]
    if more is not None:
        forms_ += [
            _form("structured_outputs.json", more.json, _json),
            _form("structured_outputs.json_object", more.json_object or None, lambda _: forms.any_object()),
            _form("structured_outputs.regex", more.regex, forms.regex),
            _form("structured_outputs.choice", more.choice, _choice),
            _form("structured_outputs.grammar", more.grammar, forms.grammar),
        ]
    return forms_


def _form(param: str, value: Any, make: Callable[[Any], Part]) -> OutputForm | None:
    if value is None:
        return None
    try:
        return OutputForm(param, make(value))
    except GrammarError as error:
        raise _invalid_grammar(param, error) from None


def _json(schema: Mapping[str, Any] | str) -> Part:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"it is not a JSON object: {error}") from None
    return forms.json_schema(schema)


def _choice(options: list[str]) -> Part:
    if not 1 <= len(options) <= MAX_OPTIONS:
        raise GrammarError(f"it has {len(options)} options; give 1 to {MAX_OPTIONS}")
    return forms.choice(options)


def _invalid_grammar(param: str, error: GrammarError) -> Exception:
    return bad_parameter(param, f"cannot constrain the output: {str(error).strip()}", "invalid_grammar")
