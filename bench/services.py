"""What the benchmarks share that run a service, in their own process or in another: its groups, its start and stop."""

import contextlib
import json
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from lucevisor.app.model_files import open_model
from lucevisor.config import Config, load
from lucevisor.deployment.service import Observer, Service

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "etc" / "demo" / "demo-qwen35-22m-q4_k_m.gguf"


def groups_toml(options, threads=0):
    """``options.groups`` equal groups of ``options.backend`` for ``options.model``; cpu groups share the cores, or have
    ``threads`` each.
    """
    names = [f"g{i}" for i in range(options.groups)]
    text = f'[model]\npath = "{options.model}"\n'
    for name in names:
        text += f'[groups.{name}]\nbackend = "{options.backend}"\n'
        if options.backend == "cpu":
            text += f"threads = {threads or max(1, os.cpu_count() // options.groups)}\n"
    devices = ", ".join(f'"{name}:0"' for name in names)
    return f"{text}[placement]\ntarget_devices = [{devices}]\ntarget_layer_split = {[1] * options.groups}\n"


@contextlib.asynccontextmanager
async def running(config, directory, settings=(), timeout_s=600.0, model=None):
    """The service of a configuration or its file, READY; stopped at the end.  SystemExit if it does not become so."""
    config = config if isinstance(config, Config) else load(config, settings)
    service = Service(config, [model or open_model(config)], Path(directory), Observer())
    try:
        await service.start()
        if not await service.wait_ready(timeout_s):
            raise SystemExit(service.reason())
        yield service
    finally:
        await service.stop(0.0)


@contextlib.contextmanager
def supervisor(name, config, *overrides):
    """A supervisor in a process of its own, started as a user starts it; its status.  ``config``: a file, or a function
    that makes one in a directory.
    """
    with tempfile.TemporaryDirectory(prefix="lv") as directory:
        environment = os.environ | {"XDG_RUNTIME_DIR": directory, "NO_COLOR": "1"}

        def lucevisor(*arguments):
            command = [sys.executable, "-m", "lucevisor", *arguments, "--name", name]
            return subprocess.run(command, env=environment, text=True, check=True, stdout=subprocess.PIPE).stdout

        path = config(Path(directory)) if callable(config) else config
        settings = [part for override in overrides for part in ("--set", override)]
        lucevisor("start", str(path), "--daemon", "--timeout", "600", *settings)
        try:
            yield json.loads(lucevisor("status", "--json"))
        finally:
            lucevisor("stop")


def paced_python(directory):
    """An interpreter for groups whose daemons compute nothing (paced_daemon.py)."""
    python = Path(directory) / "python"
    paced = ROOT / "bench" / "paced_daemon.py"
    python.write_text(
        "#!/bin/sh\n"
        f'[ "$4 $5" = "-m daemons" ] || exec {shlex.quote(sys.executable)} "$@"\n'
        f'shift 5\nexec {shlex.quote(sys.executable)} -u {shlex.quote(str(paced))} "$@"\n'
    )
    python.chmod(stat.S_IRWXU)
    return python
