"""Snapshot headers that a program, not a disk, made wrong: changed, with a checksum that matches again."""

import json
from hashlib import sha256


def rewritten(header, **changes):
    """The header with other metadata, or with other fields of its slot; None takes one away."""
    rows = json.loads(header[8:])
    metadata = rows["__metadata__"]
    of_slot = {key: value for key, value in changes.items() if key not in metadata}
    if of_slot:
        record = json.loads(metadata["slot"]) | of_slot
        record = {key: value for key, value in record.items() if value is not None or key not in changes}
        metadata["slot"] = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    metadata |= {key: value for key, value in changes.items() if key in metadata}
    if "slot_check" not in changes:
        metadata["slot_check"] = sha256(metadata["slot"].encode()).hexdigest()
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    size = max(len(header) - 8, len(text))
    return size.to_bytes(8, "little") + text.ljust(size)
