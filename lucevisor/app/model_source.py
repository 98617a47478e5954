"""Where the model file is: a path, or ``hf:owner/repo/file`` fetched through huggingface_hub into its own cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from lucevisor.config import Config
from lucevisor.config.values import HubFile
from lucevisor.errors import ConfigError

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def part_names(file: str) -> list[str]:
    """Names of all parts of a possibly split file."""
    match = _PART.search(file)
    if match is None:
        return [file]
    return [f"{file[: match.start()]}-{i:05d}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]


def resolve(config: Config, notify: Callable[[str], None] = lambda _: None) -> Path:
    """Path of the model's (first) file on this machine, downloading when it is a hub path.

    Resumes broken downloads; HF_HUB_OFFLINE=1 uses the cache only.  Raises ConfigError naming ``model.path``.
    """
    source = config.model.source
    if isinstance(source, HubFile):
        return _download(config, source, notify)
    if not source.is_file():
        why = "is a directory" if source.is_dir() else "there is no such file"
        raise ConfigError(
            "model.path", str(source), why, "a path is relative to the configuration file", file=str(config.file)
        )
    return source


def _download(config: Config, source: HubFile, notify: Callable[[str], None]) -> Path:
    from huggingface_hub import hf_hub_download  # slow to import, and only needed for hub paths
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    paths = []
    for name in part_names(source.file):
        notify(f"model {source.repo_id}/{name}")
        try:
            paths.append(Path(hf_hub_download(source.repo_id, name)))
        except LocalEntryNotFoundError as e:
            why = "is not in the local cache and the hub cannot be reached"
            hint = "check the network and HF_HUB_OFFLINE"
            raise ConfigError("model.path", config.model.path, why, hint, file=str(config.file)) from e
        except HfHubHTTPError as e:
            why, hint = f"the hub answered: {e}", "check owner, repo, file and HF_TOKEN"
            raise ConfigError("model.path", config.model.path, why, hint, file=str(config.file)) from e
    return paths[0]
