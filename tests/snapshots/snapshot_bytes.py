"""Snapshot headers that a program, not a disk, made wrong: changed, with a check that matches again."""

import json

from lucevisor.snapshots.file_format import header_check

CHECK_AT = 8 + len('{"__metadata__":{"header_check":"')


def rewritten(header, **metadata):
    """The header with other metadata; None takes a key away."""
    rows = json.loads(header[8:])
    for key, value in metadata.items():
        if value is None:
            del rows["__metadata__"][key]
        else:
            rows["__metadata__"][key] = value
    text = json.dumps(rows, separators=(",", ":")).encode()
    size = max(len(header) - 8, len(text))
    whole = bytearray(size.to_bytes(8, "little") + text.ljust(size))
    whole[CHECK_AT : CHECK_AT + 64] = header_check(whole).encode()
    return bytes(whole)
