"""What a daemon is started with: environment, arguments, staging directory, and what becomes of its output."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.config import GroupConfig
from lucevisor.errors import LucevisorError
from lucevisor.protocol.authentication import read_key
from lucevisor.supervision.child import (
    LONGEST_LINE,
    N_KEPT_LINES,
    OutputLines,
    environment,
    stage_packages,
)
from lucevisor.supervision.listener import Listener

INHERITED = {
    "PATH": "/bin",
    "HOME": "/root",
    "PYTHONPATH": "/somewhere",
    "PYTHONHOME": "/elsewhere",
    "VIRTUAL_ENV": "/venv",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "CUDA_VISIBLE_DEVICES": "0",
    "HIP_VISIBLE_DEVICES": "1",
    "ROCR_VISIBLE_DEVICES": "1",
}


def env_of(tmp_path, threads=0, **group):
    return environment(GroupConfig(name="g", **group), threads, tmp_path).added_to(INHERITED)


def test_the_supervisors_python_settings_do_not_travel(tmp_path):
    env = env_of(tmp_path, backend="cuda")
    assert env["PYTHONPATH"] == str(tmp_path)
    assert env["PATH"] == "/bin"
    assert not env.keys() & {"PYTHONHOME", "VIRTUAL_ENV", "NOTIFY_SOCKET"}


@pytest.mark.parametrize(
    ("group", "visible"),
    [
        ({"backend": "cpu"}, {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}),
        ({"backend": "cuda"}, {"CUDA_VISIBLE_DEVICES": "0"}),
        ({"backend": "cuda", "visible_devices": ("2", "3")}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ({"backend": "hip"}, {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1"}),
        ({"backend": "hip", "env": {"CUDA_VISIBLE_DEVICES": "5"}, "visible_devices": ("0",)}, None),
    ],
)
def test_a_group_sees_its_own_backends_devices(tmp_path, group, visible):
    env = env_of(tmp_path, **group)
    seen = {key: value for key, value in env.items() if "VISIBLE" in key}
    if visible is None:
        visible = {"CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}
    assert seen == visible


def test_threads_reach_a_cpu_group_and_the_configuration_wins(tmp_path):
    assert env_of(tmp_path, threads=3, backend="cpu")["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in env_of(tmp_path, backend="cpu")
    own = env_of(tmp_path, threads=3, backend="cpu", env={"OMP_NUM_THREADS": "2", "PYTHONPATH": "/mine"})
    assert own["OMP_NUM_THREADS"] == "2"
    assert own["PYTHONPATH"] == str(tmp_path)  # a daemon that imports another lucevisor would be refused anyway


def test_staging_shows_daemons_and_what_they_share_and_nothing_else(tmp_path):
    staging = stage_packages(tmp_path).directory
    assert stat.S_IMODE(staging.stat().st_mode) == 0o700
    probe = (
        "import lucevisor.protocol.messages, daemons.options\n"
        "import importlib.util as u\n"
        "for name in ('lucevisor.errors', 'lucevisor.config', 'lucevisor.supervision', 'structlog', 'aiohttp'):\n"
        "    try:\n"
        "        found = u.find_spec(name)\n"
        "    except ModuleNotFoundError:\n"
        "        found = None\n"
        "    assert found is None, name\n"
    )
    # -S: without site-packages; msgspec, which a daemon's environment holds, is given by itself
    import msgspec

    only = staging.parent / "only"
    only.mkdir()
    (only / "msgspec").symlink_to(os.path.dirname(msgspec.__file__))
    env = {"PYTHONPATH": f"{staging}:{only}", "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-S", "-c", probe], env=env, cwd=staging, check=True)


def test_a_staging_that_was_removed_is_made_again(tmp_path):
    staged = stage_packages(tmp_path)
    shutil.rmtree(tmp_path)
    staged.renew()
    assert (staged.directory / "daemons" / "__main__.py").is_file()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("")  # in its place
    with pytest.raises(LucevisorError, match="was removed and cannot be made again: File exists; keep the run dir"):
        staged.renew()


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))), cut=st.integers(1, 50)
)
def test_lines_come_out_whole_however_the_bytes_are_cut(lines, cut):
    data = "".join(line + "\n" for line in lines).encode()
    of, got = OutputLines(), []
    for start in range(0, len(data), cut):
        got += of.feed(data[start : start + cut])
    assert got == [line for line in lines if line]
    assert of.end() == []


def test_output_is_bounded_in_length_and_count():
    of = OutputLines()
    assert of.feed(b"a" * (LONGEST_LINE + 5000) + b"\nshort\r\nlast") == ["a" * LONGEST_LINE + " […]", "short"]
    assert of.end() == ["last"]
    assert len(of.feed(b"line\n" * 2000)) == 2000
    assert len(of.kept) == N_KEPT_LINES
    assert N_KEPT_LINES < 1000


def test_a_key_that_is_made_for_a_start_reaches_the_daemon_whole():
    """Also one that would begin or end with white space, which is no part of a key in a file."""

    async def main():
        for _ in range(200):
            listener = Listener()
            assert read_key(listener.key_descriptor()) == listener.credentials.key
            listener.close()

    asyncio.run(main())
