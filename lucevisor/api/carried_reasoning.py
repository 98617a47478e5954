"""Reasoning as clients of the Responses API carry it from one request to the next (`encrypted_content`).

Invariant: what is decoded is what was encoded.  It is encoded, not secret: the client may read the reasoning anyway.
"""

from __future__ import annotations

import base64
import binascii


def encode_reasoning(text: str) -> str:
    """Return reasoning in a form that clients send back unread."""
    return base64.b64encode(text.encode()).decode()


def decode_reasoning(encoded: str) -> str | None:
    """Return the reasoning, or None if another server encoded it."""
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
