"""The `openai` client of a running supervisor, for `chat` and `demo`."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from lucevisor.errors import LucevisorError

if TYPE_CHECKING:
    from openai import OpenAI


def connect(status: dict[str, Any], key: str = "") -> OpenAI:
    """Return a client of the supervisor with that status.  Raises LucevisorError if the `openai` package is missing."""
    try:
        from openai import DefaultHttpxClient, OpenAI
    except ImportError as e:
        raise LucevisorError("this command needs the `openai` package: pip install 'lucevisor[client]'") from e
    http_client = DefaultHttpxClient(verify=_trusting(cert)) if (cert := status["tls_cert_file"]) else None
    return OpenAI(base_url=f"{status['url']}/v1", api_key=key or "none", max_retries=0, http_client=http_client)


def _trusting(cert_file: str) -> ssl.SSLContext:
    """Trust this one certificate, of the supervisor on this machine, whatever name it is for."""
    context = ssl.create_default_context(cafile=cert_file)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
