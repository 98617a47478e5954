"""How the supervisor judges a Hello."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import daemons
import lucevisor
from lucevisor.model.values import Backend, Dtype
from lucevisor.protocol.handshake import Expected, check_hello, source_hash
from lucevisor.protocol.loading import DeviceInfo, Hello


def device(index, name="Radeon 8060S"):
    return DeviceInfo(index, name, 1 << 36, 1 << 35, "gfx1151", [Dtype.BFLOAT16])


HELLO = Hello(
    protocol=1,
    source_hash="0123456789abcdef",
    pid=42,
    python="3.12.3",
    executable="/opt/rocm-env/bin/python",
    torch="2.9.1+rocm6.4",
    backend=Backend.HIP,
    devices=[device(0), device(1)],
    host_total_bytes=1 << 37,
    packages={"numpy": "2.1.3", "gguf": "0.17.1", "msgspec": "0.22.0", "triton": "3.4.0"},
)
EXPECTED = Expected("right", Backend.HIP, "0123456789abcdef", [0, 1])


def problems(expected=EXPECTED, **changes):
    return [str(problem) for problem in check_hello(msgspec.structs.replace(HELLO, **changes), expected)]


def test_a_matching_daemon_is_accepted():
    assert problems() == []
    assert problems(python="3.11.0rc1", torch="2.4.0a0+git1234", packages=HELLO.packages | {"gguf": "0.17"}) == []
    assert problems(Expected("right", Backend.HIP, HELLO.source_hash, [])) == []


@pytest.mark.parametrize(
    ("changes", "what", "advice"),
    [
        ({"protocol": 2}, "speaks protocol 2, not 1", "restart the supervisor"),
        ({"source_hash": "ffff"}, "other code (hash ffff) than the supervisor (0123", "-m pip uninstall lucevisor"),
        ({"python": "3.10.14"}, "is Python 3.10.14; at least 3.11 is required", "set python in [groups.right]"),
        (
            {"torch": ""},
            "cannot import torch",
            "install a ROCm build with /opt/rocm-env/bin/python -m pip install torch",
        ),
        (
            {"torch": "2.3.1+rocm6.0"},
            "torch 2.3.1+rocm6.0 of /opt/rocm-env/bin/python is older than 2.4",
            "--upgrade torch",
        ),
        (
            {"packages": {"numpy": "2.1.3", "msgspec": "0.22.0"}},
            "/opt/rocm-env/bin/python cannot import gguf",
            "/opt/rocm-env/bin/python -m pip install 'gguf>=0.17'",
        ),
        (
            {"packages": HELLO.packages | {"msgspec": "0.18.6"}},
            "msgspec 0.18.6 of /opt/rocm-env/bin/python is older than 0.19",
            "-m pip install 'msgspec>=0.19'",
        ),
        (
            {"torch": "2.9.1+cu128", "backend": Backend.CUDA},
            "group 'right' is configured as hip, but torch 2.9.1+cu128 of /opt/rocm-env/bin/python is a CUDA build",
            'or set backend = "cuda" in [groups.right]',
        ),
        (
            {"torch": "2.9.1", "backend": Backend.CPU, "devices": []},
            "group 'right' is configured as hip, but torch 2.9.1 of /opt/rocm-env/bin/python is a CPU build",
            "install a ROCm build with /opt/rocm-env/bin/python -m pip install torch",
        ),
        (
            {"devices": [], "device_problem": "there is no /dev/kfd"},
            "torch 2.9.1+rocm6.4 of /opt/rocm-env/bin/python is a ROCm build, but sees no GPU (there is no /dev/kfd)",
            "rocminfo must list it",
        ),
        (
            {"devices": [device(0)]},
            "right:1 is not visible to its torch; visible: right:0 (Radeon 8060S)",
            "of the environment or in [groups.right] env",
        ),
    ],
)
def test_each_problem_comes_with_its_fix(changes, what, advice):
    found = problems(**changes)
    assert len(found) == 1
    assert what in found[0]
    assert advice in found[0]


def test_a_cpu_group_has_every_index():
    """Each is a shard of its own on the host."""
    cpu = Expected("left", Backend.CPU, HELLO.source_hash, [0, 1, 7])
    assert problems(cpu, backend=Backend.CPU, devices=[device(0, "EPYC")]) == []
    assert "left:0 is not visible" in problems(cpu, backend=Backend.CPU, devices=[])[0]


# ---- the hash of both ends' code


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
