"""Opens the model that a configuration names, and those beside it: files and headers, no weights; finds its card."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import msgspec
import structlog
from msgspec import Meta

from lucevisor.api.contexts import SamplingDefaults
from lucevisor.config import Config, HubFile, renamed_errors
from lucevisor.config.formats import HUB_PREFIX
from lucevisor.deployment.served_model import ServedDrafter, ServedModel
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors, LucevisorError
from lucevisor.model.drafters import draft_paths, gemma4_assistant, mtp, open_draft, read_draft_spec
from lucevisor.model.families import FAMILIES, open_spec
from lucevisor.model.gguf_files import GgufFiles, part_paths
from lucevisor.model.gguf_header import GgufError, TruncatedFileError
from lucevisor.model.lora import LoraAdapter
from lucevisor.model.lora_files import open_adapter, with_adapters
from lucevisor.model.spec import ModelSpec
from lucevisor.model.vision import VisionSpec, open_vision
from lucevisor.placement.planner import model_options
from lucevisor.protocol.loading import DraftKind
from lucevisor.source_tree import locate
from lucevisor.text.template import ChatTemplate, TemplateError
from lucevisor.text.tokenizer import Tokenizer
from lucevisor.text.vocabulary import TokenizerError, named_tokens

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf|\.safetensors)$")
_CHECKPOINT = ".safetensors"
_CHECKPOINT_CONFIG = "config.json"


def part_names(file: str) -> list[str]:
    match = _PART.search(file)
    if match is None:
        return [file]
    return [f"{file[: match.start()]}-{i:05d}-of-{match[2]}{match[3]}" for i in range(1, int(match[2]) + 1)]


def resolve_file(
    config: Config, key: str, source: Path | HubFile, notify: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the path of the (first) file that `key` names, downloading it if need be: ``notify`` gets what.

    Raises ConfigError.
    """
    if isinstance(source, HubFile):
        return _Download(config, key, source, notify).run()
    if source.is_file() or (key == "draft.path" and source.is_dir()):
        return source
    why = "is a directory" if source.is_dir() else "there is no such file"
    if source.exists() and not source.is_dir():
        why = "is not a regular file"
    raise ConfigError(key, str(source), why, "a path is relative to the configuration file", file=str(config.file))


def find_hub_file(model: str) -> str:
    """Return ``hf:owner/repo/file`` for ``hf:owner/repo[:quant]``: its file of that quantisation, Q4_K_M by default."""
    repo, _, quant = model.removeprefix(HUB_PREFIX).partition(":")
    if not model.startswith(HUB_PREFIX) or repo.count("/") > 1:
        return model
    from huggingface_hub import HfApi  # slow to import

    try:
        files = HfApi().list_repo_files(repo)
    except Exception as error:  # its own, and those of its HTTP library, which differs between versions
        hint = "check owner and repo, HF_TOKEN and HF_ENDPOINT, or name a file of this machine"
        raise LucevisorError(f"{model}: the files of {repo} cannot be listed: {_first_line(error)}; {hint}") from error
    models = sorted(f for f in files if f.endswith(".gguf") and "mmproj" not in f and part_names(f)[0] == f)
    matching = [f for f in models if (quant or "Q4_K_M").lower() in f.lower()] or ([] if quant else models)
    if not matching:
        what = f"no GGUF file with {quant!r} in its name" if quant and models else "no GGUF file"
        raise LucevisorError(
            f"{model}: the repository has {what}" + (f"; it has {', '.join(models)}" if models else "")
        )
    return f"{HUB_PREFIX}{repo}/{min(matching, key=len)}"


@dataclass(frozen=True, slots=True)
class _Download:
    """One model from the hub: all parts from one commit."""

    config: Config
    key: str
    source: HubFile
    notify: Callable[[str], None]

    def run(self) -> Path:
        """Fetch all parts and return the path of the first."""
        names = part_names(self.source.file)
        if self.source.file.endswith(_CHECKPOINT):
            names.append(str(PurePosixPath(self.source.file).with_name(_CHECKPOINT_CONFIG)))
        first = self._part(names[0], None)
        commit = first.parents[names[0].count("/")].name  # snapshots/COMMIT/FILE
        for name in names[1:]:
            self._part(name, commit)
        return first

    def _part(self, name: str, commit: str | None) -> Path:
        """Return the path of one file, of the newest commit or of ``commit``."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache  # slow to import

        repo = self.source.repo_id
        if not isinstance(try_to_load_from_cache(repo, name, revision=commit), str):
            self.notify(f"{repo}/{name}")
        try:
            return Path(hf_hub_download(repo, name, revision=commit))
        except Exception as error:  # its own, and those of its HTTP library, which differs between versions
            raise self._refusal(name, error) from error

    def _refusal(self, name: str, error: Exception) -> ConfigError:
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )

        repo = self.source.repo_id
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        match error:
            case OfflineModeIsEnabled():
                why = f"{name} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids asking the hub"
                return self._error(why, "unset HF_HUB_OFFLINE for one start, or name a file of this machine")
            case GatedRepoError():
                why = f"the repository {repo} is gated"
                return self._error(why, "accept its terms on the hub and set HF_TOKEN")
            case RepositoryNotFoundError():
                why = f"the hub has no repository {repo}, or does not show it to you ({_first_line(error)})"
                return self._error(why, "check owner and repo; set HF_TOKEN if it is private")
            case EntryNotFoundError():
                return self._error(f"the repository {repo} has no file {name}", "check its name, letter by letter")
            case HfHubHTTPError():
                return self._error(f"the hub answered: {_first_line(error)}", "check HF_TOKEN, or try again later")
        why = f"{name} cannot be fetched: {type(error).__name__}: {_first_line(error)}"
        return self._error(why, "check the network, HF_ENDPOINT and the disk, and start again")

    def _error(self, why: str, hint: str) -> ConfigError:
        value = f"hf:{self.source.repo_id}/{self.source.file}"
        return ConfigError(self.key, value, why, hint, file=str(self.config.file))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


log = structlog.get_logger("lucevisor.app")


class FamilyCard(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One card: for models of these ``architectures`` whose ``general.name`` the expression ``name`` is found in.

    ``stop``: control tokens that end an answer, too.
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
    """Open the model and those beside it: locate or download the files and read their headers.  Raises ConfigError."""
    path = resolve_file(config, "model.path", config.model.source, notify)
    with _reading(config, "model.path", config.model.path, "name a file of a family this version runs"):
        spec, files = open_spec(path, model_options(config)), part_paths(path)
    spec = with_adapters(spec, open_adapters(config, spec, notify))
    drafter, (scorer, scorer_tokenizer) = open_drafter(config, spec, notify), open_scorer(config, spec, notify)
    template, encoder = open_template(config, spec), open_encoder(config, spec, notify)
    name = config.model.name or spec.name
    return ServedModel(spec, files, name, drafter, scorer, template, encoder, scorer_tokenizer)


def open_models(config: Config, notify: _Notify = lambda _: None) -> list[ServedModel]:
    """Open each model of a configuration.  Raises ConfigErrors, with the keys of the file."""
    opened, errors = [], list[ConfigError]()
    for own in config.each_model:
        try:
            opened.append(open_model(own, notify))
        except ConfigError as error:
            errors += renamed_errors(error, own)
    if errors:
        raise ConfigErrors(errors)
    return opened


def open_adapters(config: Config, spec: ModelSpec, notify: _Notify = lambda _: None) -> list[LoraAdapter]:
    """Open the LoRA adapters of a model.  Raises ConfigError."""
    opened = []
    for name, adapter in config.lora.items():
        key = f"lora.{name}"
        if name == (config.model.name or spec.name):
            hint = "give the adapter, or the model, another name"
            raise ConfigError(key, NO_VALUE, "is the id of the model, too", hint, file=str(config.file))
        path = resolve_file(config, f"{key}.path", adapter.source, notify)
        with _reading(config, f"{key}.path", adapter.path, f"name an adapter of {spec.name}"):
            opened.append(open_adapter(name, path, adapter.scale, spec))
    return opened


def without_unusable(config: Config) -> Config:
    """Return the configuration without files of `server.models_dir` that cannot be served."""
    unusable = []
    for name in config.found & config.models.keys():
        own = config.models[name]
        try:
            open_spec(Path(own.model.path), model_options(own))
        except (GgufError, OSError) as error:
            log.warning("file of server.models_dir is left out", file=own.model.path, reason=str(error))
            unusable.append(name)
    if unusable and len(unusable) == len(config.models):
        why = "has no GGUF file that can be served; the log says why"
        raise ConfigError("server.models_dir", config.server.models_dir, why, "name another", file=str(config.file))
    return config.without_models(unusable) if unusable else config


def open_template(config: Config, spec: ModelSpec) -> str | None:
    """Return the chat template in place of the model's own, if any.  Raises ConfigError."""
    if not config.model.chat_template:
        return None
    with _reading(config, "model.chat_template", config.model.chat_template, "name a file with a Jinja template"):
        source = Path(config.model.chat_template).read_text("utf-8")
        ChatTemplate(source, named_tokens(spec.files.metadata))
    return source


def open_tokenizer(config: Config, spec: ModelSpec) -> Tokenizer:
    with _reading(config, "model.path", config.model.path, "convert the file again, or name another"):
        return Tokenizer.from_gguf(spec.files.metadata)


_SPLITS = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")
"""Keys of a file's metadata that decide how it splits text."""


def open_scorer(
    config: Config, target: ModelSpec, notify: _Notify = lambda _: None
) -> tuple[ModelSpec | None, Tokenizer | None]:
    """Open the scoring model of ``[pflash]``, if something needs it, and its tokenizer, if it is not that of
    ``target``.  Raises ConfigError."""
    source = config.pflash.source
    if not config.scores or source is None:
        return None, None
    path = resolve_file(config, "pflash.path", source, notify)
    hint = "name a file of a causal family this version runs, such as Qwen3-0.6B"
    with _reading(config, "pflash.path", config.pflash.path, hint):
        spec = open_spec(path)
        if spec.pooling.bidirectional:
            raise GgufError(str(path), "metadata value 'general.architecture'", f"{spec.architecture!r} is an encoder")
        metadata, own = spec.files.metadata, target.files.metadata
        same = all(metadata.get(key) == own.get(key) for key in _SPLITS)
        return spec, None if same else Tokenizer.from_gguf(metadata)


def open_encoder(config: Config, target: ModelSpec, notify: _Notify = lambda _: None) -> VisionSpec | None:
    """Open the vision encoder of ``[vision]``, if any.  Raises ConfigError."""
    source = config.vision.source
    if source is None:
        return None
    path = resolve_file(config, "vision.path", source, notify)
    hint = f"name the mmproj file that was converted with {target.name}"
    with _reading(config, "vision.path", config.vision.path, hint):
        return open_vision(path, target)


def open_drafter(config: Config, target: ModelSpec, notify: _Notify = lambda _: None) -> ServedDrafter | None:
    """Open the drafter that ``[draft]`` means for ``target``, if any.  Raises ConfigError."""
    kind, source = config.draft.kind, config.draft.source
    if kind in ("off", "lookup"):
        return None
    if not target.pooling.generates:
        if source is not None:
            why, hint = f"{target.name} generates nothing, so there is nothing to draft", "remove the key"
            raise ConfigError("draft.path", config.draft.path, why, hint, file=str(config.file))
        return None
    drafter = None
    if source is not None:
        path = resolve_file(config, "draft.path", source, notify)
        hint = f"name a drafter of {target.name}, or remove the key"
        with _reading(config, "draft.path", config.draft.path, hint):
            files = open_draft(draft_paths(path))
            drafter = _read_drafter(files, target, kind if kind != "auto" else _draft_kind(files, target), config)
    elif kind == "mtp" or has_mtp_head(target):
        drafter = _built_in_mtp_head(config, target)
    if drafter is None:
        _check_device(config)
    return drafter


@contextmanager
def _reading(config: Config, key: str, value: str, hint: str) -> Iterator[None]:
    """Turn what reading the file that a key names raises into ConfigError."""
    try:
        yield
    except (GgufError, OSError, UnicodeDecodeError, TemplateError, TokenizerError) as error:
        why = str(error).removeprefix(f"{value}: ")
        if isinstance(error, OSError):
            why, hint = f"cannot be read: {error.strerror or error}", "name a file that this user may read"
        elif isinstance(error, TruncatedFileError):  # whose message has a hint
            hint = ""
        raise ConfigError(key, value, why, hint, file=str(config.file)) from error


def has_mtp_head(target: ModelSpec) -> bool:
    n = target.files.metadata.get(f"{target.architecture}.nextn_predict_layers", 0)
    return isinstance(n, int) and n > 0


def _built_in_mtp_head(config: Config, target: ModelSpec) -> ServedDrafter | None:
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
    """Return the kind by architecture: a head has its model's, Gemma's assistant its own, a draft model a family's."""
    architecture = files.metadata.get("general.architecture")
    if architecture == gemma4_assistant.ARCHITECTURE or architecture == target.architecture in mtp.FAMILIES:
        return DraftKind.MTP
    return DraftKind.MODEL if architecture in FAMILIES else DraftKind.DFLASH


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
