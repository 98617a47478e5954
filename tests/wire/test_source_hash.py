"""One hash for the code of both ends."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import daemons
import lucevisor.wire
from lucevisor.wire.errors import WireError
from lucevisor.wire.source_hash import WIRE_DIRECTORY, source_hash

DAEMONS = Path(daemons.__file__).parent


@pytest.fixture
def copy(tmp_path):
    """(wire, daemons): small packages to change."""
    for name, files in {
        "wire": ["__init__.py", "codec.py", "families/a.py"],
        "daemons": ["__init__.py", "serve.py"],
    }.items():
        for file in files:
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {file}\n")
    return tmp_path / "wire", tmp_path / "daemons"


def test_both_sides_compute_the_same():
    assert Path(lucevisor.wire.__file__).resolve().parent == WIRE_DIRECTORY
    ours = source_hash(WIRE_DIRECTORY, DAEMONS)
    assert re.fullmatch("[0-9a-f]{16}", ours)
    code = (
        "import sys, lucevisor.wire, importlib.util\n"
        "from pathlib import Path\n"
        "from lucevisor.wire.source_hash import source_hash\n"
        "daemons = Path(importlib.util.find_spec('daemons').origin).parent\n"
        "print(source_hash(Path(lucevisor.wire.__file__).parent, daemons), 'daemons' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [ours, "False"]


def test_the_place_of_the_packages_does_not_matter(tmp_path):
    shutil.copytree(WIRE_DIRECTORY, tmp_path / "elsewhere")
    assert source_hash(tmp_path / "elsewhere", DAEMONS) == source_hash(WIRE_DIRECTORY, DAEMONS)


def test_every_change_of_a_source_changes_it(copy):
    wire, daemons_directory = copy
    seen = {source_hash(wire, daemons_directory)}

    def changed():
        found = source_hash(wire, daemons_directory)
        assert found not in seen
        seen.add(found)

    (wire / "codec.py").write_text("# codec.pz\n")  # one letter
    changed()
    (wire / "families" / "a.py").rename(wire / "families" / "b.py")
    changed()
    (daemons_directory / "new.py").write_text("")
    changed()
    (wire / "new.py").write_text("")
    (daemons_directory / "new.py").unlink()  # the same file on the other side
    changed()
    (wire / "new.py").unlink()
    (wire / "codec.py").write_text("# codec.py\n")
    (wire / "families" / "b.py").rename(wire / "families" / "a.py")
    assert source_hash(wire, daemons_directory) in seen  # back to the first


def test_what_is_no_source_does_not_count(copy):
    before = source_hash(*copy)
    for name in ("codec.pyc", "__pycache__/codec.cpython-311.pyc", "py.typed", "codec.py~"):
        path = copy[0] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert source_hash(*copy) == before


def test_a_directory_without_sources_is_refused(copy, tmp_path):
    with pytest.raises(WireError, match="no Python files"):
        source_hash(copy[0], tmp_path / "nowhere")
