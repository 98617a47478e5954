"""``lucevisor start``: in the foreground, or in the background with ``--daemon``."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lucevisor.app.rundir import check_name, default_name, is_locked, run_path
from lucevisor.cli.admin_client import AdminClient, WaitDisplay
from lucevisor.cli.configured import configured
from lucevisor.cli.options import SECONDS, config_argument, python_option
from lucevisor.config import load
from lucevisor.errors import ExitCode, LucevisorError, NotReadyError, NotRunningError
from lucevisor.protocol.process import end_with_parent
from lucevisor.source_tree import module_command


@click.command()
@config_argument
@python_option
@click.option("--name", help="Name for status, stop and the others (default: the file's stem).")
@click.option("-v", "--verbose", is_flag=True, help="Log details, too: --set log.level=debug.")
@click.option("--daemon", is_flag=True, help="Run in the background; return when the endpoint is ready.")
@click.option("--detached", is_flag=True, hidden=True, help="What --daemon starts: logs to its file only.")
@click.option("--starter", "starter_pid", type=int, hidden=True, help="For `demo`, `chaos`: ends with this process.")
@click.option("--allow-faults", metavar="NAME=SECONDS,...", hidden=True, help="For `chaos`: fault hooks, deadlines.")
@click.option(
    "--take-over", is_flag=True, help="Take name and address over from a running supervisor, if there is one."
)
@click.option(
    "--drain",
    "drain_s",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="With --take-over: seconds that requests of the other one have to end.",
)
@click.option(
    "--wait-forever",
    is_flag=True,
    help="Go on trying groups that cannot come up, with growing pauses, instead of ending.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help="With --daemon: seconds to wait for READY.",
)
def start(
    config: Path,
    overrides: tuple[str, ...],
    pythons: tuple[str, ...],
    name: str | None,
    verbose: bool,
    daemon: bool,
    detached: bool,
    starter_pid: int | None,
    allow_faults: str | None,
    take_over: bool,
    drain_s: float,
    wait_forever: bool,
    timeout_s: float,
) -> int:
    """Start CONFIG: one daemon per group, one model over all devices, one endpoint.

    CONFIG is a configuration file. A GGUF file or hf:OWNER/REPO[:QUANT] in its place is served on all devices that this
    machine has.
    """
    if verbose:
        overrides = (*overrides, "log.level=debug")
    config, name = configured(config, pythons, name)
    loaded = load(config, overrides)
    target = check_name(name) if name is not None else default_name(config)
    if daemon:
        more = ["--take-over", "--drain", str(drain_s)] if take_over else []
        more += ["--starter", str(starter_pid)] if starter_pid is not None else []
        more += ["--wait-forever"] if wait_forever else []
        if is_locked(run_path(target)) and not take_over:
            raise LucevisorError(
                f"a supervisor named {target!r} runs already: stop it, give this one another --name, or use --take-over"
            )
        return _in_background(config, overrides, target, timeout_s, more)
    # SIGKILL, as for daemons: `chaos` may be killed while the supervisor is stopped, which would keep SIGTERM waiting.
    if starter_pid is not None and not end_with_parent(starter_pid):
        raise LucevisorError(f"process {starter_pid}, for which this supervisor was to run, has ended")
    from lucevisor.app.run import RunOptions, parse_fault_limits, run  # imports the whole supervisor
    from lucevisor.app.status import LoadProgress
    from lucevisor.cli.progress import StartDisplay

    limits = parse_fault_limits(allow_faults) if allow_faults is not None else None
    options = RunOptions(not detached, wait_forever, drain_s if take_over else None, limits)
    if detached:
        return int(run(loaded, target, LoadProgress(), options))
    with StartDisplay(loaded) as display:
        return int(run(loaded, target, display, options))


def _in_background(config: Path, overrides: tuple[str, ...], name: str, timeout_s: float, more: Sequence[str]) -> int:
    """Start a foreground supervisor in a session of its own and wait until it serves."""
    directory = run_path(name)
    command = [*module_command(), "start", str(config.resolve()), "--name", name, "--detached", *more]
    for override in overrides:
        command += ["--set", override]
    # Once it serves, it writes to its log only, so a pipe without a reader does no harm.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        with WaitDisplay("start") as watch:
            status = _until_ready(process, AdminClient(directory / "admin.sock"), name, timeout_s, watch)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        click.echo(f"{name} was not ready yet and is stopped", err=True)
        raise
    if status is None:
        return process.returncode
    for group in status["groups"]:
        for warning in group["warnings"]:
            click.echo(f"group {group['name']} is slow: {warning}", err=True)
    click.echo(f"{name} is ready at {status['url']} (pid {status['pid']})")
    return ExitCode.DONE


def _until_ready(
    process: subprocess.Popen[bytes], client: AdminClient, name: str, timeout_s: float, watch: WaitDisplay
) -> dict[str, Any] | None:
    """Return the status of the ready supervisor, None if it ended and printed why."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            output = process.stderr.read().decode(errors="replace") if process.stderr is not None else ""
            click.echo(output, err=True, nl=False)
            if output and process.returncode > 0:
                return None
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"code {process.returncode}"
            raise LucevisorError(f"{name} ended with {how} before it was ready; start it without --daemon to see why")
        try:
            status = client.call("GET", "/status")
        except NotRunningError:
            time.sleep(0.1)
            continue
        if status["pid"] != process.pid:  # this one is still to be taken over
            time.sleep(0.1)
            continue
        if status["state"] == "ready":
            return status
        watch.show(status)
        time.sleep(0.1)
    raise NotReadyError(
        f"{name} was not ready within {timeout_s:.0f} s; it still starts: `lucevisor status --name {name}`"
    )
