"""Locates or downloads a model file: a path, or ``hf:owner/repo/file`` in huggingface_hub's cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lucevisor.config import Config, HubFile
from lucevisor.config.formats import HUB_PREFIX
from lucevisor.errors import ConfigError, LucevisorError

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf|\.safetensors)$")
_CHECKPOINT = ".safetensors"
_CHECKPOINT_CONFIG = "config.json"


def part_names(file: str) -> list[str]:
    """Return the names of all parts of a possibly split file."""
    match = _PART.search(file)
    if match is None:
        return [file]
    return [f"{file[: match.start()]}-{i:05d}-of-{match[2]}{match[3]}" for i in range(1, int(match[2]) + 1)]


def resolve_file(
    config: Config, key: str, source: Path | HubFile, notify: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the path of the (first) file that `key` names on this machine, downloading it from the hub if need be.

    ``notify`` gets what is about to be downloaded.  Raises ConfigError.
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
    """One model from the hub: all parts from one commit of its repository.  ``key``: what names it."""

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
        """Return the cached or downloaded path of one file, of the newest commit or of ``commit``."""
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
