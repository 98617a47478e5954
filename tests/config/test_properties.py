"""A valid file is taken as it is written, and a Config written down and read again is the same."""

import json
import re
import tomllib
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucevisor.config.load import from_tree
from lucevisor.config.schema import keys_of
from lucevisor.config.sections import GROUPS, SECTIONS

FILE = Path("/etc/box/box.toml")
QUICK = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

# --- TOML text: written here, so that tomllib is on the way of every value


def toml(value) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return re.sub("\x7f", r"\\u007f", json.dumps(value, ensure_ascii=False))
    return repr(value)


def document(tree: dict) -> str:
    """Return a whole file."""
    return "".join(f"{toml(name)} = {toml(section)}\n" for name, section in tree.items())


# --- valid configurations

line = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)
path = line.filter(lambda text: not text.startswith(("hf:", "~")))
auto = st.just("auto")
size = st.integers(0, 2**40) | st.builds("{}{}".format, st.integers(0, 999), st.sampled_from(["KiB", "MiB", "GiB"]))
name = st.from_regex(r"[a-z0-9_-]{1,32}", fullmatch=True).filter(lambda text: text not in ("cpu", "cuda", "hip"))
share = st.floats(0, 1, exclude_min=True)
VALID = {
    "model": {
        "path": path.filter(bool),
        "name": line,
        "chat_template": path,
        "yarn_attn_factor": st.sampled_from(["default", "file"]),
    },
    "engine": {
        "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
        "kv_dtype": st.sampled_from(["auto", "float32", "float16", "bfloat16", "q8_0"]),
        "max_context": auto | st.integers(1, 2**20),
        "max_sequences": st.integers(1, 4096),
        "prefill_chunk": st.integers(1, 2**20),
        "pages": auto | st.integers(1, 2**20),
        "swap_space": st.integers(0, 2**40),
    },
    "server": {
        "host": st.sampled_from(["127.0.0.1", "::1", "localhost"]),
        "port": st.integers(0, 65535),
        "allow_open": st.booleans(),
        "max_queue": st.integers(1, 2**20),
        "max_connections": st.integers(1, 2**16),
        "drain_s": st.floats(0.01, 86400.0),
        "cors_origins": st.lists(st.sampled_from(["*", "http://a", "https://b:1", "tauri://c"]), unique=True),
    },
    "cache": {
        "prefix_slots": st.integers(0, 2**20),
        "memory": size,
        "disk": size,
        "dir": st.sampled_from(["", "/var/cache/lucevisor"]),
        "states": st.sampled_from(["device", "host"]),
        "min_tokens": st.integers(0, 2**30),
        "checkpoint_pages": st.integers(0, 2**20),
        "normalise": st.sampled_from(["off", "fix", "move"]),
    },
    "draft": {
        "kind": st.sampled_from(["auto", "off", "lookup", "mtp"]),  # dflash needs a path
        "path": path,
        "width": auto | st.integers(1, 64),
    },
    "kvflash": {
        "pool_tokens": auto | st.integers(0, 2**31 - 1),
        "policy": st.sampled_from(["lru", "qk", "exact"]),  # drafter needs pflash.path
        "tau": st.integers(1, 2**20),
        "host": size,
    },
    "pflash": {
        "mode": st.just("off"),  # the others need a path
        "path": path,
        "threshold": st.integers(1, 2**30),
        "keep_ratio": share | st.just(1),
        "curve": st.dictionaries(st.integers(1, 2**30), share, max_size=3).map(
            lambda points: [f"{tokens}:{points[tokens]!r}" for tokens in sorted(points)]
        ),
        "window": st.integers(512, 2**20),
    },
    "recovery": {
        "hold_s": st.floats(0, 86400) | st.integers(0, 86400),
        "journal": size,
        "spares": st.integers(0, 8),
        "restart_limit": st.builds("{}/{}s".format, st.integers(0, 9999), st.integers(1, 999999)),
    },
    "log": {
        "format": st.sampled_from(["auto", "console", "json"]),
        "level": st.sampled_from(["debug", "info", "warning", "error"]),
    },
}
group = st.fixed_dictionaries(
    {"backend": st.sampled_from(["cpu", "cuda", "hip"])},
    optional={
        "python": path,
        "env": st.dictionaries(
            st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True),
            st.text(max_size=8).filter(lambda text: "\0" not in text),
            max_size=3,
        ),
        "threads": auto | st.integers(1, 1024),
        "cores": st.lists(st.integers(0, 8191), unique=True, max_size=4),
    },
)


@st.composite
def trees(draw):
    """The tables of a valid file."""
    groups = draw(st.dictionaries(name, group, min_size=1, max_size=4))
    indices = {each: draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)) for each in groups}
    devices = draw(st.permutations([f"{each}:{index}" for each in groups for index in indices[each]]))
    weight = st.floats(1e-9, 1e9) | st.integers(1, 99)
    split = draw(
        auto | st.lists(weight, min_size=len(devices), max_size=len(devices)) | st.just(ranges(draw, len(devices)))
    )
    model = {key: kind for key, kind in VALID["model"].items() if key != "path"}
    tree = {"model": draw(st.fixed_dictionaries({"path": VALID["model"]["path"]}, optional=model)), GROUPS: groups}
    tree["placement"] = {"target_devices": list(devices), "target_layer_split": split}
    if draw(st.booleans()):
        tree["placement"]["goal"] = draw(st.sampled_from(["latency", "throughput"]))
    for section, keys in VALID.items():
        if section != "model" and draw(st.booleans()):
            tree[section] = draw(st.fixed_dictionaries({}, optional=keys))
    if draw(st.booleans()):
        tree.setdefault("draft", {})["device"] = draw(st.sampled_from(devices))
    return tree


def ranges(draw, n_devices):
    """Return contiguous layer ranges, one for each device."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=n_devices, max_size=n_devices))
    starts = [sum(sizes[:index]) for index in range(n_devices)]
    return [f"{start}-{start + size}" for start, size in zip(starts, sizes, strict=True)]


def n_bytes(value):
    """Return the bytes a size stands for, computed apart from the code under test."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return value if isinstance(value, int) else int(value[:-3]) * units[value[-3:]]


def expected(section, key, value):
    """Return what `as_dict` must say of a value that was written in the file."""
    if (section, key) in (("cache", "memory"), ("cache", "disk"), ("kvflash", "host"), ("recovery", "journal")):
        return n_bytes(value)
    is_path = (section in ("model", "draft", "pflash") and key == "path") or key == "chat_template"
    is_path = is_path or (key == "python" and "/" in value)
    return str(FILE.parent / value) if is_path and value else value


@QUICK
@given(tree=trees())
def test_a_valid_file_is_taken_as_it_is_written_and_reads_back(tree):
    config = from_tree(tomllib.loads(document(tree)), FILE)
    written = config.as_dict()
    for section, table in tree.items():
        tables = {f"{GROUPS}.{each}": inner for each, inner in table.items()} if section == GROUPS else {section: table}
        for dotted, keys in tables.items():
            shown = written[GROUPS][dotted.partition(".")[2]] if section == GROUPS else written[section]
            for key, value in keys.items():
                assert shown[key] == expected(section, key, value), f"{dotted}.{key}"
                assert f"{dotted}.{key}" in config.set_keys
    again = from_tree(tomllib.loads(document(written)), FILE)
    assert again == config
    assert again.as_dict() == json.loads(json.dumps(written))


@QUICK
@given(tree=trees(), key=st.sampled_from(sorted(f"{section}.{key}" for section, keys in VALID.items() for key in keys)))
def test_an_option_is_effective_or_named_in_a_notice_never_unknown(tree, key):
    config = from_tree(tree, FILE)
    assert {notice.key for notice in config.notices} <= config.set_keys


def test_the_valid_files_have_all_keys():
    drawn = {f"{section}.{key}" for section, keys in VALID.items() for key in keys}
    everything = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in keys_of(kind)}
    left_out = (
        everything
        - drawn
        - {"placement.target_devices", "placement.target_layer_split", "placement.goal"}
        - {"draft.device", "pflash.device", "server.api_keys_file", "server.admin_keys_file"}
        - {"server.tls_cert_file", "server.tls_key_file"}
    )
    assert not left_out
