"""A process that ends with its parent."""

from __future__ import annotations

import os
import subprocess
import sys

CHILD = """
import os, sys, time
from lucevisor.protocol.process import end_with_parent
print(end_with_parent(int(sys.argv[1])), flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
"""


def test_a_process_is_killed_when_its_parent_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"True\n"
        parent.kill()
        assert parent.stdout.read() == b""  # end of file: the child, which has it open too, is gone


def test_another_process_is_not_the_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(os.getppid())], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"False\n"
        process.kill()
