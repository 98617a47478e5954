"""One hash for the code of both ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import daemons
import lucevisor
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.handshake import source_hash

LUCEVISOR = Path(lucevisor.__file__).resolve().parent
DAEMONS = Path(daemons.__file__).parent


@pytest.fixture
def copy(tmp_path):
    """(lucevisor, daemons): small packages to change."""
    for name, files in {
        "lucevisor": ["__init__.py", "api/app.py"],
        "lucevisor/protocol": ["__init__.py", "codec.py"],
        "lucevisor/model": ["__init__.py", "families/a.py"],
        "daemons": ["__init__.py", "serve.py"],
    }.items():
        for file in files:
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {file}\n")
    return tmp_path / "lucevisor", tmp_path / "daemons"


def test_both_sides_compute_the_same():
    ours = source_hash(LUCEVISOR, DAEMONS)
    assert re.fullmatch("[0-9a-f]{16}", ours)
    code = (
        "import sys, lucevisor, importlib.util\n"
        "from pathlib import Path\n"
        "from lucevisor.protocol.handshake import source_hash\n"
        "daemons = Path(importlib.util.find_spec('daemons').origin).parent\n"
        "print(source_hash(Path(lucevisor.__file__).parent, daemons), 'daemons' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [ours, "False"]


def test_every_change_of_a_source_changes_it(copy):
    package, daemons_directory = copy
    protocol, model = package / "protocol", package / "model"
    seen = {source_hash(package, daemons_directory)}

    def changed():
        found = source_hash(package, daemons_directory)
        assert found not in seen
        seen.add(found)

    (protocol / "codec.py").write_text("# codec.pz\n")  # one letter
    changed()
    (model / "families" / "a.py").rename(model / "families" / "b.py")
    changed()
    (daemons_directory / "new.py").write_text("")
    changed()
    (model / "new.py").write_text("")
    (daemons_directory / "new.py").unlink()  # the same file on the other side
    changed()
    (model / "new.py").rename(protocol / "new.py")
    changed()
    (protocol / "new.py").unlink()
    (protocol / "codec.py").write_text("# codec.py\n")
    (model / "families" / "b.py").rename(model / "families" / "a.py")
    assert source_hash(package, daemons_directory) in seen  # back to the first


def test_other_files_do_not_count(copy):
    before = source_hash(*copy)
    for name in ("codec.pyc", "__pycache__/codec.cpython-311.pyc", "py.typed", "codec.py~", "../api/app.py"):
        path = copy[0] / "protocol" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert source_hash(*copy) == before


def test_a_directory_without_sources_is_refused(copy, tmp_path):
    with pytest.raises(ProtocolError, match="no Python files"):
        source_hash(copy[0], tmp_path / "nowhere")
