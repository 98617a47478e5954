"""The bodies of llama.cpp's /completion and /infill as completion requests.

Pure: translates names and forms of prompts and leaves meaning and limits to completions.py.  The bodies are open, as
Ollama's are: llama.cpp ignores what it does not know, and its clients send what concerns other releases.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lucevisor.api.errors import bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.checks import check_length
from lucevisor.api.prompts.completions import infill_ids, read_completion
from lucevisor.api.prompts.decoding import ParameterRules, ignored, to_record
from lucevisor.api.prompts.schemas import ALIASES, HARMLESS, NEUTRAL, CompletionBody, Flag
from lucevisor.text.infill import OtherFile

RULES: Final = ParameterRules(
    harmless={
        **{name: HARMLESS[name] for name in ("cache_prompt", "id_slot", "timings_per_token")},
        "lora": list[Any],
        "min_keep": int,
        "n_discard": int,
        "n_indent": int,
        "n_keep": int,
        "post_sampling_probs": bool,
        "repeat_last_n": int,
        "response_fields": list[str],
        "samplers": list[str] | str,
        "t_max_predict_ms": int,
    },
    refused={},
    neutral={"dynatemp_range": NEUTRAL["dynatemp_range"]},
    aliases={**ALIASES, "n_cmpl": "n"},
    open=True,
)
_LIMITS: Final = ("n_predict", "max_tokens")
_OWN: Final = frozenset(CompletionBody.__struct_fields__)


class LlamaCompletionBody(CompletionBody, kw_only=True):
    """POST /completion and /completions.  A prompt may mix texts and ids."""

    prompt: str | list[Any] | dict[str, Any]  # type: ignore[assignment]
    return_tokens: Flag = None


class ExtraInput(msgspec.Struct):
    """Text from another file, before the gap."""

    text: str
    filename: str = "tmp"


class InfillBody(CompletionBody, kw_only=True):
    """POST /infill.  `prompt` goes on with `input_prefix`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraInput] | None = None
    prompt: str = ""
    return_tokens: Flag = None


def read_llama_completion(fields: dict[str, Any], ports: Ports) -> PreparedRequest:
    """Prepare the request in a decoded body; raises ApiError naming the parameter at fault."""
    return _read(LlamaCompletionBody, fields, ports)


def read_infill(fields: dict[str, Any], ports: Ports) -> PreparedRequest:
    """Prepare the request in a decoded body; raises ApiError naming the parameter at fault."""
    return _read(InfillBody, fields, ports)


def _read(kind: type[LlamaCompletionBody] | type[InfillBody], fields: dict[str, Any], ports: Ports) -> PreparedRequest:
    unlimited = [name for name in _LIMITS if isinstance(n := fields.get(name), int) and n < 0]
    fields = {name: value for name, value in fields.items() if name not in unlimited}
    body = to_record(kind, fields, RULES)
    if isinstance(body, InfillBody):
        files = [OtherFile(extra.filename, extra.text) for extra in body.input_extra or ()]
        prompt: Any = infill_ids(body.input_prefix + body.prompt, body.input_suffix, files, "input_suffix", ports)
    else:
        prompt = _prompt(body.prompt, ports)
    own = {RULES.aliases.get(name, name): value for name, value in fields.items()}
    kept = {name: value for name, value in own.items() if name in _OWN}
    prepared = read_completion({**kept, "prompt": prompt, "return_token_ids": body.return_tokens}, ports)
    options = msgspec.structs.replace(prepared.options, ignored=ignored(kind, fields, RULES))
    return PreparedRequest(options, prepared.prompts)


def _prompt(prompt: str | list[Any] | dict[str, Any], ports: Ports) -> str | list[int] | list[list[int]]:
    """Return a text, the ids of one prompt, or those of several."""
    if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt) and len(prompt) != 1:
        return [_ids(part, f"prompt[{index}]", ports) for index, part in enumerate(prompt)]
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        return _ids(prompt[0], "prompt[0]", ports)
    return prompt if isinstance(prompt, str) else _ids(prompt, "prompt", ports)


def _ids(prompt: object, where: str, ports: Ports) -> list[int]:
    """Return the ids of a text, of ids, or of both mixed."""
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise bad_parameter(f"{where}.multimodal_data", "is not supported; this server reads text only")
        prompt, where = prompt.get("prompt_string"), f"{where}.prompt_string"
    ids: list[int] = []
    for index, part in enumerate(prompt if isinstance(prompt, list) else [prompt]):
        place = f"{where}[{index}]" if isinstance(prompt, list) else where
        if isinstance(part, str):
            check_length(part, place, ports)
            ids += ports.tokenizer.encode(part, parse_special=True) if index else ports.tokenizer.encode_prompt(part)
        elif isinstance(part, int) and not isinstance(part, bool) and 0 <= part < ports.tokenizer.n_vocab:
            ids.append(part)
        else:
            raise bad_parameter(place, f"is neither text nor a token id, 0 to {ports.tokenizer.n_vocab - 1}")
    return ids
