"""The `openai` client of a running supervisor, for `chat` and `demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lucevisor.errors import LucevisorError

if TYPE_CHECKING:
    from openai import OpenAI


def connect(url: str, key: str = "") -> OpenAI:
    """Return a client of the endpoint at ``url``.  Raises LucevisorError if the `openai` package is missing."""
    try:
        from openai import OpenAI
    except ImportError as e:
        raise LucevisorError("this command needs the `openai` package: pip install 'lucevisor[client]'") from e
    return OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0)
