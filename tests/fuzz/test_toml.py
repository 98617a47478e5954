"""Configurations of every kind of wrong: a Config, or ConfigErrors that each name key, value and what to write."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from lucevisor.config import Config, load
from lucevisor.config.schema import keys_of
from lucevisor.config.sections import SECTIONS, GroupConfig
from lucevisor.errors import ConfigError
from tests.fuzz.steady import amounts, mutated, run

ETC = Path(__file__).parents[2] / "etc"
WORDS = (
    *("true", "false", "0", "1", "-1", "nan", "inf", "-inf", "1e999", "1_0", "0x10", "9" * 50, "9" * 5000, "1.5"),
    *("[]", "{}", '""', "''", '"auto"', '"cpu"', '"left:0"', '"20GiB"', '"5/60s"', '"0-4"', "[0.5, 0.5]"),
    *('["left:0"]', '"\\u0000"', '"\\ud800"', '"\\U0001f389"', "1979-05-27T07:32:00Z", "07:32:00", '"""a\nb"""'),
    *("'''a'''", "[[]]", "[1, 'a']", "{a = 1}", "{a.b.c = 1}", "[" * 50, "{a=" * 200, '"' + "x" * 3000 + '"'),
    *('"~/x"', '"hf:a/b/c"', '"nan"', '"1e400"', '" 1"', '"127.1"', '"::1"', '"*"', '"a,b"', "[1,]", "[,]", "", "="),
    *('"', "'", '"""', "#"),
)


@cache
def seeds() -> list[str]:
    """The files that come with the project, also with all their commented keys in force."""
    files = [path.read_text(encoding="utf-8") for path in sorted(ETC.glob("*.toml"))]
    full = next(text for text in files if "# " in text)
    return [*files, "\n".join(line.removeprefix("# ") if " = " in line else line for line in full.splitlines())]


@cache
def names() -> list[str]:
    sections = {**SECTIONS, "groups.left": GroupConfig, "groups.right": GroupConfig}
    return [f"{name}.{key}" for name, section in sections.items() for key in keys_of(section)]


def wrong_name(rng):
    name = rng.choice(names())
    match rng.randrange(6):
        case 0:
            at = rng.randrange(len(name))
            return name[:at] + rng.choice("abc._-\" '\0é") + name[at + rng.randrange(2) :]
        case 1:
            return name + "." + rng.choice(("a", "a.b.c.d", "PATH", "'x y'"))
        case 2:
            return rng.choice(("", ".", "a", "groups", "model", "groups.a.env.B", "x" * 500, "é.é", "a" + ".a" * 40))
        case _:
            return name


def made(rng):
    """A file of some sections in some order, with keys that exist or nearly do and values that fit or do not."""
    lines = ["[model]", "path = 'a.gguf'", "[groups.left]", "backend = 'cpu'"] if rng.random() < 0.7 else []
    for _ in range(rng.randrange(8)):
        name, word = wrong_name(rng), rng.choice(WORDS)
        section, _, key = name.rpartition(".")
        if rng.random() < 0.3:
            lines.append(f"{name} = {word}")
        else:
            lines += [rng.choice((f"[{section}]", f"[[{section}]]", f"[{section}]")), f"{key} = {word}"]
    return "\n".join(lines)


def text_of(rng):
    """The bytes of one file."""
    how = rng.randrange(4)
    if how == 0:
        return made(rng).encode("utf-8")
    seed = rng.choice(seeds())
    if how == 1:
        lines = seed.splitlines()
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(lines))
            key, equals, _ = lines[at].partition("=")
            lines[at] = f"{key}{equals or '='} {rng.choice(WORDS)}"
        return "\n".join(lines).encode("utf-8")
    if how == 2:
        unit = "".join(
            rng.choice((".", "a", "[", "]", "{", "}", "=", '"', "'", '"""', "\n", ",", " ", "\\", "#", "1"))
            for _ in range(rng.randint(1, 8))
        )
        return (rng.choice(("", "a = ", "a", "[")) + unit * (rng.choice((10, 300, 8000)) // len(unit))).encode("utf-8")
    return mutated(rng, (seed if rng.random() < 0.5 else made(rng)).encode("utf-8"), 8)


def overrides_of(rng):
    if rng.random() < 0.6:
        return []
    values = (word.strip("\"'") for word in rng.choices(WORDS, k=rng.randint(1, 3)))
    return [f"{wrong_name(rng)}{rng.choice(('=', '=', '=', ''))}{value}" for value in values]


def case(rng: random.Random, path: Path) -> str:
    path.write_bytes(text_of(rng))
    try:
        config = load(path, overrides_of(rng))
    except ConfigError as error:
        told = str(error)
        assert told.isprintable() or "\n" in told
        assert len(told) < 50_000
        for single in error.errors:
            assert single.why
            assert single.hint, single
            assert single.file or single.key in ("--set", "server.api_keys_file"), single
            assert "\n" not in str(single)
        return error.why.split(" ")[0] + " " + error.why.partition(" ")[2].split(" ")[0]
    assert isinstance(config, Config)
    assert all(str(notice) for notice in config.notices)
    return "read"


@pytest.mark.parametrize("n", amounts(1000, 100_000))
def test_configurations(n, tmp_path):
    path = tmp_path / "box.toml"
    outcomes = run("toml", n, lambda rng: case(rng, path), growth_kib=8 << 10)
    assert outcomes["read"]
    assert outcomes["is not"]
