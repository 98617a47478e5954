"""Opens the model that a configuration names, its drafter and its scoring model: files and headers, no weights; and
finds the defaults of its family in etc/model_cards/*.toml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import structlog
from msgspec import Meta

from lucevisor.api.app_context import SamplingDefaults
from lucevisor.app.model_source import resolve_file
from lucevisor.config import Config, renamed_errors
from lucevisor.deployment.served_model import ServedDrafter, ServedModel
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors
from lucevisor.model.drafters import draft_paths, gemma4_assistant, open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_files import GgufFiles, part_paths
from lucevisor.model.gguf_header import GgufError, TruncatedFileError
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.planner import model_options
from lucevisor.protocol.loading import DraftKind
from lucevisor.source_tree import locate
from lucevisor.text.template import ChatTemplate, TemplateError
from lucevisor.text.tokenizer import Tokenizer
from lucevisor.text.vocabulary import TokenizerError, named_tokens

log = structlog.get_logger("lucevisor")


class FamilyCard(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One card: for models of these ``architectures`` whose ``general.name`` the expression ``name`` is found in.

    ``stop``: control tokens that end an answer besides those of the file, where the vocabulary has them.
    """

    architectures: list[str]
    name: str
    stop: list[str] = []
    sampling: SamplingDefaults = SamplingDefaults()
    sampling_without_thinking: SamplingDefaults | None = None
    thinking_budgets: dict[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"], Annotated[int, Meta(ge=0)]
    ] = {}

    def stop_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        ids = (tokenizer.token_id(text) for text in self.stop)
        return frozenset(i for i in ids if i is not None and tokenizer.is_special(i))


def card_files() -> list[Path]:
    return sorted((locate("etc") / "model_cards").glob("*.toml"))


def find_card(architecture: str, metadata: Mapping[str, object]) -> FamilyCard | None:
    name = str(metadata.get("general.name", ""))
    for file in card_files():
        card = msgspec.toml.decode(file.read_bytes(), type=FamilyCard)
        if architecture in card.architectures and re.search(card.name, name, re.IGNORECASE):
            return card
    return None


_Notify = Callable[[str], None]


def open_model(config: Config, notify: _Notify = lambda _: None) -> ServedModel:
    """Open the model, its drafter and its scoring model: locate or download the files and read their headers.

    Raises ConfigError naming ``model.path``, ``model.chat_template``, ``draft.path``, ``draft.kind``, ``pflash.path``
    or a group that has nothing to do.
    """
    path = resolve_file(config, "model.path", config.model.source, notify)
    try:
        spec = open_spec(path, model_options(config))
        files = part_paths(path)
    except (GgufError, OSError) as error:
        hint = "name a file of a family this version runs"
        raise _unreadable(config, "model.path", config.model.path, error, hint) from error
    drafter, scorer = open_drafter(config, spec, notify), open_scorer(config, notify)
    return ServedModel(spec, files, config.model.name or spec.name, drafter, scorer, open_template(config, spec))


def open_models(config: Config, notify: _Notify = lambda _: None) -> list[ServedModel]:
    """Open each model of a configuration, as ``open_model`` does; raises ConfigErrors, with the keys of the file."""
    opened, errors = [], list[ConfigError]()
    for own in config.each_model:
        try:
            opened.append(open_model(own, notify))
        except ConfigError as error:
            errors += renamed_errors(error, own)
    if errors:
        raise ConfigErrors(errors)
    return opened


def open_template(config: Config, spec: ModelSpec) -> str | None:
    """Return the chat template that takes the place of the model's own, None without one; raises ConfigError."""
    if not config.model.chat_template:
        return None
    try:
        source = Path(config.model.chat_template).read_text("utf-8")
        ChatTemplate(source, named_tokens(spec.files.metadata if spec.files is not None else {}))
    except (OSError, UnicodeDecodeError, TemplateError, TokenizerError) as error:
        hint = "name a file with a Jinja template"
        raise _unreadable(config, "model.chat_template", config.model.chat_template, error, hint) from error
    return source


def open_tokenizer(config: Config, spec: ModelSpec) -> Tokenizer:
    """Build the model's tokenizer; raises ConfigError naming ``model.path``."""
    try:
        return Tokenizer.from_gguf(spec.files.metadata if spec.files is not None else {})
    except TokenizerError as error:
        hint = "convert the file again, or name another"
        raise _unreadable(config, "model.path", config.model.path, error, hint) from error


def open_scorer(config: Config, notify: _Notify = lambda _: None) -> ModelSpec | None:
    """Open the scoring model of ``[pflash]``; None while nothing needs it.  Raises ConfigError as above."""
    source = config.pflash.source
    if not config.scores or source is None:
        return None
    path = resolve_file(config, "pflash.path", source, notify)
    try:
        spec = open_spec(path)
        Tokenizer.from_gguf(spec.files.metadata if spec.files is not None else {})
    except (GgufError, TokenizerError, OSError) as error:
        hint = "name a file of a family this version runs, such as Qwen3-0.6B"
        raise _unreadable(config, "pflash.path", config.pflash.path, error, hint) from error
    return spec


def open_drafter(config: Config, target: ModelSpec, notify: _Notify = lambda _: None) -> ServedDrafter | None:
    """Open the drafter that ``[draft]`` means for ``target``, None without one; raises ConfigError."""
    kind, source = config.draft.kind, config.draft.source
    if kind in ("off", "lookup"):
        return None
    drafter = None
    if source is not None:
        path = resolve_file(config, "draft.path", source, notify)
        try:
            files = open_draft(draft_paths(path))
            drafter = _read_drafter(files, target, kind if kind != "auto" else _draft_kind(files, target), config)
        except (GgufError, OSError) as error:
            hint = f"name a drafter of {target.name}, or remove the key"
            raise _unreadable(config, "draft.path", config.draft.path, error, hint) from error
    elif kind == "mtp" or has_mtp_head(target):
        drafter = _built_in_mtp_head(config, target)
    if drafter is None:
        _check_device(config)
    return drafter


def _unreadable(config: Config, key: str, value: str, error: Exception, hint: str) -> ConfigError:
    """Return the error for a file that a key names.  The message for a truncated file already has a hint."""
    why = str(error).removeprefix(f"{value}: ")
    if isinstance(error, OSError):
        why, hint = f"cannot be read: {error.strerror or error}", "name a file that this user may read"
    elif isinstance(error, TruncatedFileError):
        hint = ""
    return ConfigError(key, value, why, hint, file=str(config.file))


def has_mtp_head(target: ModelSpec) -> bool:
    assert target.files is not None
    n = target.files.metadata.get(f"{target.architecture}.nextn_predict_layers", 0)
    return isinstance(n, int) and n > 0


def _built_in_mtp_head(config: Config, target: ModelSpec) -> ServedDrafter | None:
    assert target.files is not None
    try:
        return _read_drafter(target.files, target, DraftKind.MTP, config)
    except GgufError as error:
        if config.draft.kind == "auto":
            log.warning("the model's MTP head is not used", reason=str(error))
            return None
        hint = "name a file with the head in draft.path; nearest: auto"
        raise ConfigError("draft.kind", config.draft.kind, str(error), hint, file=str(config.file)) from error


def _read_drafter(files: GgufFiles, target: ModelSpec, kind: str, config: Config) -> ServedDrafter:
    return ServedDrafter(read_draft_spec(files, target, kind, model_options(config)), files)


def _draft_kind(files: GgufFiles, target: ModelSpec) -> DraftKind:
    """Return the kind by architecture: an MTP head has its model's, Gemma's assistant its own."""
    is_head = files.metadata.get("general.architecture") in (target.architecture, gemma4_assistant.ARCHITECTURE)
    return DraftKind.MTP if is_head else DraftKind.DFLASH


def _check_device(config: Config) -> None:
    """Check ``draft.device`` where there is no drafter: its group must have layers."""
    device = config.draft.device
    if device is None:
        return
    why = "the model's file has no MTP head, and draft.path is empty"
    if config.placement.devices and device.group not in {target.group for target in config.placement.devices}:
        reason = f"has no device in placement.target_devices and no drafter to run: {why}"
        hint = f"name a drafter in draft.path, or remove [groups.{device.group}] and draft.device"
        raise ConfigError(f"groups.{device.group}", NO_VALUE, reason, hint, file=str(config.file))
    log.warning("draft.device has no effect", device=str(device), reason=why)
