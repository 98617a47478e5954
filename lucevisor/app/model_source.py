"""Finds the file of the model or of its drafter: a path, or ``hf:owner/repo/file`` downloaded through huggingface_hub
into its cache.

Requests, authentication and cache layout are huggingface_hub's.  Added here: an interrupted download resumes where it
stopped, also in another process (huggingface_hub forgets what it has when its call ends), and progress is printed as
plain lines where there is no terminal.
Invariant: a file is in the cache under its final name only when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from lucevisor.config import Config, HubFile
from lucevisor.config.formats import HUB_PREFIX
from lucevisor.errors import ConfigError, LucevisorError

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf|\.safetensors)$")
_CHECKPOINT = ".safetensors"
_CHECKPOINT_CONFIG = "config.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = ".lucevisor.incomplete"


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

    A drafter may be a directory.  ``notify`` gets lines of progress; on a terminal huggingface_hub shows its own bar
    instead.  With HF_HUB_OFFLINE=1, or while the hub does not answer, the cache is used.  Raises ConfigError naming
    ``key``.
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
    """Return ``hf:owner/repo/file`` for ``hf:owner/repo[:quant]``: its file of that quantisation, Q4_K_M by default.

    Others are returned as they are.
    Raises LucevisorError.
    """
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


class _Counted(io.FileIO):
    """A file being downloaded that reports every tenth of ``total`` bytes.  Writes whole buffers or raises."""

    def __init__(self, path: Path, total: int, report: Callable[[int], None]) -> None:
        super().__init__(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        self._total, self._report = total, report
        self._tenth = 10 * self.seek(0, os.SEEK_END) // max(1, total)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        while len(view):
            view = view[super().write(view) or 0 :]
        tenth = 10 * self.tell() // max(1, self._total)
        if tenth > self._tenth:
            self._tenth = tenth
            self._report(10 * tenth)
        return len(data)


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
        for name in names[1:]:
            self._part(name, first.relative_to(self._folder() / "snapshots").parts[0])
        return first

    def _part(self, name: str, commit: str | None) -> Path:
        """One file of the newest commit, or of ``commit``: found in the cache or fetched."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url  # slow to import

        repo = self.source.repo_id
        try:
            facts = get_hf_file_metadata(hf_hub_url(repo, name, revision=commit))
        except Exception as error:  # its own, and those of its HTTP library, which differs between versions
            return self._cached(name, commit, error)
        try:
            self._fetch(name, facts)
            return Path(hf_hub_download(repo, name, revision=commit))
        except ConfigError:
            raise
        except Exception as error:  # as above
            raise self._refusal(name, error) from error

    def _cached(self, name: str, commit: str | None, error: Exception) -> Path:
        """Return the file that an earlier start left in the cache, or raise ConfigError for ``error``."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import OfflineModeIsEnabled

        cached = try_to_load_from_cache(self.source.repo_id, name, revision=commit)
        if not isinstance(cached, str):
            raise self._refusal(name, error) from error
        if not isinstance(error, OfflineModeIsEnabled):
            self.notify(f"{self.source.repo_id}/{name} taken from the cache, as the hub answered: {_first_line(error)}")
        return Path(cached)

    def _fetch(self, name: str, facts: HfFileMetadata) -> None:
        """Download the file to its place in the cache, unless it is there."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # exported, but not in __all__

        if facts.etag is None or facts.size is None or facts.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            self.notify(f"{self.source.repo_id}/{name}: a download of this file cannot be resumed")
            return  # huggingface_hub fetches it in its own way
        blob = self._folder() / "blobs" / facts.etag
        lock = self._cache() / ".locks" / self._folder().name / f"{facts.etag}.lock"
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # huggingface_hub's own lock: two starts at once download once
            if not blob.exists():
                # not facts.location: on the way there the HTTP library drops the token where the host changes
                url = hf_hub_url(self.source.repo_id, name, revision=facts.commit_hash)
                self._fetch_to(blob, name, url, facts.size)

    def _fetch_to(self, blob: Path, name: str, url: str, size: int) -> None:
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # as above

        unfinished = blob.with_name(blob.name + _UNFINISHED)
        done = unfinished.stat().st_size if unfinished.exists() else 0
        if done > size:
            unfinished.unlink()
            done = 0
        free = shutil.disk_usage(blob.parent).free
        if size - done > free:
            why = f"{name} takes {size - done} more bytes, {free} are free in {blob.parent}"
            raise self._error(why, "free some, or set HF_HOME to a larger disk")
        what = f"{self.source.repo_id}/{name}"
        lines = self.notify if not _has_bar() else lambda _: None
        lines(f"{what}: {size} bytes" + (f", {done} are there" if done else ""))
        with _Counted(unfinished, size, lambda percent: lines(f"{what} {percent}% of {size} bytes")) as file:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            http_get(
                url,
                cast(BinaryIO, file),
                resume_size=done,
                headers=headers,
                expected_size=size,
                displayed_filename=name,
            )
        if done:  # a crash of the machine may have damaged what an earlier process left
            self._check(unfinished, blob.name, name)
        os.replace(unfinished, blob)

    def _check(self, path: Path, etag: str, name: str) -> None:
        """Compare a resumed file with the hub's checksum, if the etag is one.  Raises ConfigError."""
        if _SHA256.fullmatch(etag) is None:
            return
        self.notify(f"{self.source.repo_id}/{name}: checking what was resumed")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == etag:
                return
        path.unlink()
        raise self._error(f"{name} was resumed, but its bytes are wrong", "start again to download it anew")

    def _refusal(self, name: str, error: Exception) -> ConfigError:
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )

        repo = self.source.repo_id
        match error:
            case OfflineModeIsEnabled():
                why = f"{name} is not in the cache {self._cache()}, and HF_HUB_OFFLINE forbids asking the hub"
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
        return self._error(why, "check the network, HF_ENDPOINT and the disk, and start again: the download resumes")

    def _error(self, why: str, hint: str) -> ConfigError:
        value = f"hf:{self.source.repo_id}/{self.source.file}"
        return ConfigError(self.key, value, why, hint, file=str(self.config.file))

    def _cache(self) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE).expanduser().resolve()

    def _folder(self) -> Path:
        from huggingface_hub.file_download import repo_folder_name

        return self._cache() / repo_folder_name(repo_id=self.source.repo_id, repo_type="model")


def _has_bar() -> bool:
    """Return whether huggingface_hub shows its progress bar."""
    from huggingface_hub.utils import are_progress_bars_disabled  # type: ignore[attr-defined]  # as above

    return sys.stderr.isatty() and not are_progress_bars_disabled()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
