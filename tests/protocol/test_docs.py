"""docs/protocol.md agrees with the code."""

import re

import pytest

from lucevisor.protocol.codec import encode
from lucevisor.protocol.docs import PAGE, main, page
from lucevisor.protocol.messages import MAX_METADATA_BYTES, MAX_PAYLOAD_BYTES, MESSAGES, MIB, Shutdown
from lucevisor.protocol.steps import Operation

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_up_to_date(capsys):
    assert page(TEXT) == TEXT, "run python -m lucevisor.protocol.docs"
    assert main(["--check"]) == 0
    assert main(["--what"]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_changed_page_is_noticed(monkeypatch, tmp_path, capsys):
    stale = tmp_path / "protocol.md"
    stale.write_text(TEXT.replace("| `Shutdown` |", "| `Stop` |"), encoding="utf-8")
    monkeypatch.setattr("lucevisor.protocol.docs.PAGE", stale)
    assert main(["--check"]) == 1
    assert "is out of date" in capsys.readouterr().err
    assert main([]) == 0
    assert stale.read_text(encoding="utf-8") == TEXT


def test_lost_markers_are_an_error():
    with pytest.raises(SystemExit, match="restore the markers"):
        page(TEXT.replace("<!-- end of states -->", ""))


def test_every_message_has_its_row():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {(int(kind), name) for kind, name in rows} == {(int(k), m.record.__name__) for k, m in MESSAGES.items()}


def test_the_example_frame():
    block = re.search(r"```\n(4c565352.*?)```", TEXT, re.DOTALL)
    assert block is not None
    digits = "".join(re.sub(r"   .*", "", line) for line in block[1].splitlines()).replace(" ", "")
    assert bytes.fromhex(digits) == encode(Shutdown(), 0x0102030405060708)


def test_numbers_in_the_prose():
    assert f"{MAX_METADATA_BYTES // MIB} MiB of metadata and {MAX_PAYLOAD_BYTES // MIB} MiB of payload" in TEXT
    for operation in Operation.__args__:
        assert re.search(rf"\b{operation.__struct_config__.tag}\s+`{operation.__name__}`", TEXT)
