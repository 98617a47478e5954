"""The Jinja dialect of chat templates, in a sandbox, with the origin of every character kept.

Each string literal of the template is compiled to `TracedText.own`, joins go through `concatenate`. A rendering ends
after MAX_CPU_S, and no operator makes more than MAX_CHARS, as a template is a program that came with the weights."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Template, nodes, pass_eval_context
from jinja2 import TemplateError as JinjaError
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_join, do_replace
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lucevisor.text.provenance import MAX_CHARS, TracedText, concatenate

MAX_SOURCE_CHARS: Final = 256 << 10
"""Ten times the longest published template; Jinja takes 1.6 KB per character to compile."""
MAX_CPU_S: Final = 5.0
_DEADLINE_S: ContextVar[float] = ContextVar("CPU time of the thread at which its rendering ends", default=math.inf)
_FOLLOWED_METHODS: Final = frozenset(["join", "replace"])


class RaisedByTemplate(JinjaError):
    """The template rejected its input with `raise_exception`."""


class TemplateLimitExceeded(SecurityError):
    """A template takes more time or memory than any prompt needs."""


class _OriginCodeGenerator(CodeGenerator):
    """Compiles string literals to traced ones, with the hooks that Jinja's native types use."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(_source(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        try:
            self.write(_source(str(node.as_const(frame.eval_ctx))))
        except nodes.Impossible:  # autoescaping changes while rendering: such text counts as foreign
            super().visit_TemplateData(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for argument in node.nodes:
            self.write("str(")
            self.visit(argument, frame)
            self.write("), ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _source("".join(map(str, group)))


def _source(value: object) -> str:
    if isinstance(value, str):
        return f"environment.own({str.__str__(value)!r})"
    if isinstance(value, list):
        return f"[{', '.join(map(_source, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{_source(item)}, ' for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_source(key)}: {_source(item)}' for key, item in value.items())}}}"
    return str(value) if isinstance(value, float) else repr(value)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """Jinja's `namespace()` without names that start with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: `namespace(self=1)` is legal
        for name in dict(*args[1:], **kwargs):
            _refuse_underscore(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} in a namespace")


class _TemplateDict:
    """Replaces `dict`, whose unbound methods could modify the arguments of a rendering."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _BoundedTemplate(Template):
    """A compiled template with a deadline per rendering."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        token = _DEADLINE_S.set(time.thread_time() + MAX_CPU_S)
        try:
            return super().render(*args, **kwargs)
        finally:
            _DEADLINE_S.reset(token)


def _check_time() -> None:
    if time.thread_time() > _DEADLINE_S.get():
        raise TemplateLimitExceeded(f"takes longer than {MAX_CPU_S:g} s")


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitExceeded for an operator whose result would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        factor = right if operator == "**" else 2
        is_large = operator != "+" and max(left.bit_length(), right.bit_length()) * factor > 4096
    elif operator == "+":
        is_large = isinstance(left, Sequence) and isinstance(right, Sequence) and len(left) + len(right) > MAX_CHARS
    else:
        many, times = (left, right) if isinstance(right, int) else (right, left)
        is_large = isinstance(many, Sequence) and isinstance(times, int) and len(many) * times > MAX_CHARS
    if is_large:
        raise TemplateLimitExceeded(f"makes a value too large by {operator}")


class TemplateLanguage(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in; `clock` answers `strftime_now`."""

    code_generator_class = _OriginCodeGenerator
    template_class = _BoundedTemplate
    intercepted_binops = frozenset(["+", "*", "**"])
    concat = staticmethod(concatenate)  # Jinja's hook for results other than str
    own = staticmethod(TracedText.own)
    step = staticmethod(_check_time)

    def __init__(self, clock: Callable[[], datetime]) -> None:
        extensions = ["jinja2.ext.loopcontrols", _GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters.update(tojson=_to_json, join=_join, replace=_replace, indent=_indent)
        del self.globals["lipsum"]  # generates unlimited text, and no chat template needs it
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda layout: clock().strftime(layout),
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
        )

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template; `join` and `replace` of a plain string keep the origin of their arguments."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and not isinstance(owner, TracedText) and __obj.__name__ in _FOLLOWED_METHODS:
            __obj = getattr(TracedText.of(owner), __obj.__name__)
        _check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be larger than its operands."""
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template and add a time check to each iteration of its loops."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimitExceeded(f"has more than {MAX_SOURCE_CHARS} characters")
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            count = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(count, lineno=loop.lineno))
            if loop.test is not None:  # also count the iterations that it skips
                loop.test = nodes.And(nodes.Not(count), loop.test, lineno=loop.lineno)
        return tree


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in transformers: no HTML escapes, no ASCII escapes, keys in insertion order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's `join` filter, origins kept."""
    joined: str = do_join(context, value, TracedText.of(d), attribute)
    return joined


@pass_eval_context
def _replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Jinja's `replace` filter, origins kept."""
    replaced: str = do_replace(context, TracedText.of(str(s)), old, new, count)
    return replaced


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent` filter, origins kept."""
    indention = width if isinstance(width, str) else " " * width
    head, *lines_below = (TracedText.of(s) + "\n").splitlines()
    lines = [indention + line if line or blank else line for line in lines_below]
    indented = TracedText("\n").join([head, *lines])
    return indention + indented if first else indented
