"""docs/protocol.md agrees with the code."""

import re

from lucevisor.protocol.codec import encode
from lucevisor.protocol.docs import PAGE, main, page
from lucevisor.protocol.messages import Shutdown

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_up_to_date():
    assert page(TEXT) == TEXT, "run python -m lucevisor.protocol.docs"
    assert main(["--check"]) == 0


def test_a_changed_page_is_noticed(monkeypatch, tmp_path, capsys):
    stale = tmp_path / "protocol.md"
    stale.write_text(TEXT.replace("| `Shutdown` |", "| `Stop` |"), encoding="utf-8")
    monkeypatch.setattr("lucevisor.protocol.docs.PAGE", stale)
    assert main(["--check"]) == 1
    assert "is out of date" in capsys.readouterr().err
    assert main([]) == 0
    assert stale.read_text(encoding="utf-8") == TEXT


def test_the_example_frame():
    block = re.search(r"```\n(4c565352.*?)```", TEXT, re.DOTALL)
    assert block is not None
    digits = "".join(re.sub(r"   .*", "", line) for line in block[1].splitlines()).replace(" ", "")
    assert bytes.fromhex(digits) == encode(Shutdown(), 0x0102030405060708)
