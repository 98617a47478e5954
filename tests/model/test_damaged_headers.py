"""Damaged headers of real files through the door that the product uses: ``open_spec`` of every family's golden file.

The headers are taken apart here, by a walker that shares nothing with the parser under test, damaged field by field,
entry by entry and byte by byte, and put in front of a hole as large as the file's data.  Whatever comes of it must be a
sound spec or a GgufError that names the file, for little memory; some damages must be refused, and by name.
A failure names the file and the number of its case, which ``make_case(Random(f"{name} {number}"), repack(name))``
makes again.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import pytest

from lucevisor.model.families import open_spec
from lucevisor.model.gguf_header import GgufError
from tests.model import gguf_bytes as raw

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FILES = ["qwen3", "qwen35", "qwen35_mtp", "qwen35moe", "gemma4_e2b", "gemma4_moe", "laguna", "laguna_mscale"]
QUICK, ALL = 100, 12_500
"""Cases a file; 8 x 12,500 = 100,000."""

MOST_MESSAGE_CHARS = 1000
MOST_BYTES_PER_BYTE = 16
"""What opening a file may take at its peak, per byte of the file: a header may claim all of it, as an array of bytes
that become Python numbers."""
MOST_GROWTH_KIB = 48 * 1024
"""How much the process may grow over all cases of a file: what leaks shows here."""

OPTIONAL = ("output.weight", "attn_gate.weight", "attn_v.weight")
"""Tensors without which a file is another model that exists: a tied table, no gates, values from the key product."""

HOSTILE = [
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 31, 32, 33, 63, 64, 65, 255, 256, 1024, 1025, 65535, 65536),
    *(2**k + d for k in (20, 24, 27, 31, 32, 38, 40, 61, 62, 63) for d in (-1, 0, 1)),
    2**64 - 8,
    2**64 - 1,
]

DAMAGES = (
    *(6 * ["field"] + ["count"] + 2 * ["lose"] + ["repeat"] + 2 * ["type"]),
    *(["key", "magic"] + 2 * ["bytes", "cut"] + ["shift"]),
)
"""What may be done to a header, the more often named the more often: see ``make_case``."""

ALIGNMENT = 32

KEYS = ["general.alignment", "split.count", "split.no", "split.tensors.count"]
"""Of files in parts, or with other alignments: the golden files have none."""


@dataclass(frozen=True)
class Piece:
    """A part of a header: the counts at its start, one metadata entry, or one row of the tensor table.

    ``fields``: (start, bytes) of each number and text in it.
    """

    name: str
    data: bytes
    fields: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Header:
    """A good file: its header in pieces, the sizes of header and file, and where its last tensor ends."""

    start: Piece
    entries: list[Piece]
    tensors: list[Piece]
    n_header: int
    n_bytes: int
    n_needed: int


class Walker:
    """Reads on through a good header and remembers the fields it passed."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at, self.start = data, at, at
        self.fields: list[tuple[int, int]] = []

    def number(self, code: str) -> int:
        n = struct.calcsize(code)
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.fields.append((self.at - self.start, n))
        self.at += n
        return int(value) if value == value and abs(value) < 2**64 else 0

    def text(self) -> str:
        n = self.number("<Q")
        self.fields.append((self.at - self.start, n))
        self.at += n
        return self.data[self.at - n : self.at].decode(errors="replace")

    def value(self, kind: int) -> None:
        if kind == raw.STRING:
            self.text()
        elif kind == raw.ARRAY:
            inner, n = self.number("<I"), self.number("<Q")
            for _ in range(n):
                self.value(inner)
        else:
            self.number(raw.PACK[kind])

    def piece(self, name: str) -> Piece:
        out = Piece(name, self.data[self.start : self.at], tuple(self.fields))
        self.start, self.fields = self.at, []
        return out


@cache
def repack(name: str) -> Header:
    data = (GOLDEN / name / "model.gguf").read_bytes()
    walker = Walker(data, 4)
    walker.number("<I")
    n_tensors, n_entries = walker.number("<Q"), walker.number("<Q")
    start = walker.piece("start")
    entries, tensors = [], []
    for _ in range(n_entries):
        key = walker.text()
        walker.value(walker.number("<I"))
        entries.append(walker.piece(key))
    for _ in range(n_tensors):
        tensor = walker.text()
        for _ in range(walker.number("<I")):
            walker.number("<Q")
        walker.number("<I")
        walker.number("<Q")
        tensors.append(walker.piece(tensor))
    oracle = gguf.GGUFReader(GOLDEN / name / "model.gguf")
    return Header(
        start, entries, tensors, walker.at, len(data), max(t.data_offset + int(t.n_bytes) for t in oracle.tensors)
    )


@dataclass
class Case:
    """A damaged file and what is known of it.  ``lost``: the tensor that was taken out, and nothing else was done.
    ``hopeless``: no tensor table can be read, or the data of a tensor are cut."""

    data: bytes
    n_bytes: int
    damages: list[str]
    lost: str = ""
    hopeless: bool = False


def hostile_entry(rng: random.Random, key: str) -> bytes:
    """A well-formed value of another type or size under a key of the file."""
    kind = rng.choice([*raw.PACK, raw.STRING, raw.ARRAY, raw.ARRAY])
    if kind == raw.ARRAY:
        inner = rng.choice([raw.BOOL, raw.I32, raw.U64, raw.F32, raw.STRING])
        length = rng.choice([0, 1, 4, 5, 6, 8, 9, 3000])
        made: dict[int, list[object]] = {
            raw.STRING: ["", "x", "yarn"],
            raw.F32: [0.0, -1.0, float("nan")],
            raw.BOOL: [True, False],
        }
        choices = made.get(inner, [0, 1, 2, 3, 64, 2**31 - 1])
        return raw.array(key, inner, [rng.choice(choices) for _ in range(length)])
    if kind == raw.STRING:
        return raw.entry(
            key, kind, rng.choice(["", "yarn", "none", "qwen35", "gemma4", "laguna", "x" * 5000, "\x1b[2J"])
        )
    if kind in (raw.F32, raw.F64):
        return raw.entry(key, kind, rng.choice([0.0, -0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf")]))
    if kind == raw.BOOL:
        return raw.entry(key, kind, rng.random() < 0.5)
    size = struct.calcsize(raw.PACK[kind])
    return text_type_value(key, kind, rng.choice(HOSTILE) % 2 ** (8 * size), size)


def text_type_value(key: str, kind: int, value: int, size: int) -> bytes:
    return raw.text(key) + struct.pack("<I", kind) + value.to_bytes(size, "little")


def with_field_changed(rng: random.Random, piece: Piece, header: Header) -> bytes:
    """One number of a piece is another one, or one text holds other bytes."""
    # at the start are type and count of an array, at the end those of a tensor and its place
    fields = rng.choice([piece.fields, piece.fields[:5], piece.fields[-5:]])
    start, n = rng.choice([f for f in fields if f[1]] or [(0, 1)])
    old = int.from_bytes(piece.data[start : start + n], "little")
    how = rng.randrange(4)
    if n > 8:
        new = bytes(rng.choice([0, 0x7F, 0x80, 0xFF, 0x2E]) for _ in range(n))
    elif how == 0:
        new = rng.randbytes(n)
    elif how == 1:
        new = ((old + rng.choice([-2, -1, 1, 2, old or 1])) % 2 ** (8 * n)).to_bytes(n, "little")
    elif how == 2:
        other = rng.choice(header.tensors).data
        new = (other[-n:] if n <= len(other) else other) or b"\0"
    else:
        new = (rng.choice(HOSTILE) % 2 ** (8 * n)).to_bytes(n, "little")
    return piece.data[:start] + new + piece.data[start + len(new) :]


def make_case(rng: random.Random, header: Header) -> Case:
    """One to three damages, of the entries, then of the bytes, then of the end of the file."""
    entries, tensors = [p.data for p in header.entries], [p.data for p in header.tensors]
    counts, magic = header.start.data, b"GGUF"
    case = Case(b"", header.n_bytes, [])
    later = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        rows, pieces = rng.choice([(entries, header.entries), (tensors, header.tensors)])
        i = rng.randrange(min(len(rows), len(pieces)))
        how = rng.choice(
            ["field"] * 6
            + ["count", "lose", "lose", "repeat", "type", "type", "magic"]
            + ["bytes", "cut"] * 2
            + ["shift"]
        )
        case.damages.append(how)
        if how == "field":
            rows[i] = with_field_changed(rng, pieces[i], header)
        elif how == "count":
            counts = with_field_changed(rng, header.start, header)
        elif how == "lose":
            case.lost = pieces[i].name if rows is tensors else ""
            del rows[i]
        elif how == "repeat":
            rows.insert(rng.randrange(len(rows)), rows[i])
        elif how == "type":
            entries[i % len(entries)] = hostile_entry(rng, header.entries[i % len(header.entries)].name)
        elif how == "key":
            entries.append(hostile_entry(rng, rng.choice(KEYS)))
        elif how == "magic":
            magic = rng.choice([b"GGML", b"FUGG", b"\0\0\0\0", b"PK\3\4", rng.randbytes(4)])
        else:
            later.append(how)
    if counts is header.start.data:
        counts = counts[:4] + struct.pack("<QQ", len(tensors), len(entries))
    data = bytearray(magic + counts + b"".join(entries) + b"".join(tensors))
    if (n_more := len(data) - header.n_header) > 0:  # the data stand behind it as before, and are not what is missing
        case.n_bytes += n_more + ALIGNMENT
    for how in later:
        at = rng.randrange(len(data))
        if how == "bytes":
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(4, len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif how == "shift":
            data[at : at + rng.choice([0, 1, 8, 100])] = rng.randbytes(rng.choice([0, 1, 8, 100]))
        else:
            anywhere = [rng.randrange(len(data)), rng.randrange(case.n_bytes + 1), header.n_needed - 1, 0, 23]
            case.n_bytes = min(case.n_bytes, rng.choice(anywhere))
    case.data = bytes(data[: case.n_bytes])
    case.lost = case.lost if len(case.damages) == 1 else ""
    case.hopeless = magic != b"GGUF" or (case.damages == ["cut"] and case.n_bytes < header.n_needed)
    return case


def check(case: Case, path: Path) -> tuple[str, int]:
    """Open one damaged file; returns what came of it, "opened" or the first word of the place that was refused, and the
    bytes it took at its peak.
    """
    path.write_bytes(case.data)
    os.truncate(path, case.n_bytes)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    spec, message, where = None, "", ""
    try:
        spec = open_spec(path)
    except GgufError as error:
        message, where = str(error), error.where  # not the error: it holds the frames, and they what they read
    peak_bytes = tracemalloc.get_traced_memory()[1] - before
    assert peak_bytes < (1 << 20) + MOST_BYTES_PER_BYTE * case.n_bytes
    if message:
        assert message.startswith(f"{path}: ")
        assert len(message.encode("utf-8")) < MOST_MESSAGE_CHARS + len(str(path))  # short, and can be printed
        names = [case.lost, case.lost.replace("gate_up", "gate")]  # without both in one, each is asked for
        by_gap = case.lost.endswith(OPTIONAL) and "a tensor between them is not listed" in message
        assert not case.lost or by_gap or any(f"tensor {name!r}" in message for name in names), message
        return where.split()[0], peak_bytes
    assert not case.hopeless
    assert spec is not None
    assert spec.n_layers >= 1
    assert spec.files is not None
    assert all(t.offset + t.n_bytes <= case.n_bytes for t in spec.files.tensors.values())
    assert case.lost.endswith(OPTIONAL) or case.lost not in needed(path.stem)
    return "opened", peak_bytes


@cache
def needed(name: str) -> frozenset[str]:
    """Tensors of a golden file that its model uses."""
    spec = open_spec(GOLDEN / name / "model.gguf")
    assert spec.files is not None
    return frozenset(spec.files.tensors) - frozenset(spec.skipped)


def amounts() -> list[object]:
    """A few cases of every file by default, 100,000 in all with ``-m slow``."""
    slow = [pytest.mark.slow, pytest.mark.timeout(900)]
    return [
        *(pytest.param(name, QUICK, id=f"{name}-{QUICK}") for name in FILES),
        *(pytest.param(name, ALL, id=f"{name}-{ALL}", marks=slow) for name in FILES),
    ]


@pytest.mark.parametrize(("name", "n"), amounts())
def test_a_damaged_header_is_rejected_by_name_or_yields_a_valid_model(name: str, n: int, tmp_path: Path) -> None:
    header, path, outcomes = repack(name), tmp_path / f"{name}.gguf", Counter[str]()
    needed(name)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = 0
    tracemalloc.start()
    try:
        for seed in range(n):
            case = make_case(random.Random(f"{name} {seed}"), header)
            try:
                outcome, peak_bytes = check(case, path)
            except Exception as e:
                e.add_note(f"{name}, case {seed}: {case.damages} {case.lost}")
                raise
            outcomes[outcome] += 1
            most = max(most, peak_bytes)
    finally:
        tracemalloc.stop()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    print(f"{name}: {n} cases, {dict(outcomes.most_common())}, at most {most >> 10} KiB at once, grown {grown_kib} KiB")
    assert outcomes["opened"] < n / 2
    assert {"opened", "metadata", "tensor", "byte"} <= outcomes.keys()
    assert grown_kib < MOST_GROWTH_KIB
