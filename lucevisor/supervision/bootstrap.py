"""Starts a daemon on another host, by the standard library alone, and passes on what the supervisor orders.

Standard input has this file, a line of JSON (``order`` of launcher.py), an archive of the daemon's source, and a byte
for each order; at its end the daemon gets SIGTERM, then SIGKILL.  Exits as the daemon did, with 128 + N for signal N.
"""

import fcntl
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

EXIT_CONFIGURATION = 78  # as in lucevisor/protocol/process.py, which is not here yet
SIGNALS = {b"s": signal.SIGUSR1, b"t": signal.SIGTERM, b"k": signal.SIGKILL}
"""Signals by order: stacks, terminate, kill."""


def refuse(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(EXIT_CONFIGURATION)


def install(archive: bytes, code_hash: str) -> Path:
    """Return a directory with the files of an archive; those that are the same stay."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lucevisor" / "code"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = cache.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        refuse(
            f"{cache} on {os.uname().nodename} can be changed by other users: remove it, or set XDG_CACHE_HOME there"
        )
    for other in cache.iterdir():  # source of which no daemon was started for a month, and none runs
        unused_s = time.time() - other.lstat().st_mtime
        if other.name != code_hash and unused_s > 30 * 86400.0 and use(other, fcntl.LOCK_EX):
            subprocess.run(["rm", "-rf", str(other)], check=False)
    directory = cache / code_hash
    directory.mkdir(mode=0o700, exist_ok=True)
    use(directory, fcntl.LOCK_SH)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            path, file = directory / member.name, files.extractfile(member)
            content = b"" if file is None else file.read()
            if path.is_file() and path.read_bytes() == content:
                continue
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.write_bytes(content)
            new.replace(path)
    os.utime(directory)
    return directory


def use(directory: Path, lock: int) -> bool:
    """Lock a directory up to the end of this process; return False where that is not possible."""
    try:
        fcntl.flock(os.open(directory, os.O_RDONLY | os.O_CLOEXEC), lock | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_secret(name: str) -> int:
    path = os.path.expanduser(name)
    here = os.uname().nodename
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        refuse(f"{path} on {here} cannot be read: {error.strerror}; copy the supervisor's cluster.secret_file there")
        raise
    if os.fstat(fd).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        refuse(f"{path} on {here} can be used by other users: chmod 600 {path}")
    return fd


def n_oom_kills() -> int:
    with open("/proc/vmstat", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def follow_orders(process: "subprocess.Popen[bytes]", orders: io.BufferedReader) -> None:
    """Signal the daemon as ordered, and end it when no more orders can come."""
    while order := orders.read(1):
        process.send_signal(SIGNALS[order])
    process.terminate()
    time.sleep(3.0)
    process.kill()


def main(stdin: io.BufferedReader) -> None:
    order = json.loads(stdin.readline())
    archive = stdin.read(order["archive_bytes"])
    if len(archive) < order["archive_bytes"]:
        sys.exit("the supervisor ended the connection")
    code, secret = install(archive, order["hash"]), open_secret(order["secret_file"])
    env = {**order["defaults"], **{key: text for key, text in os.environ.items() if key not in order["unset"]}}
    env.update(order["env"])
    env["PYTHONPATH"] = str(code)
    os.set_inheritable(secret, True)
    command = [
        sys.executable,
        *order["arguments"],
        *(f"--tls={os.path.expanduser(file)}" for file in order["tls_files"]),
    ]
    command += [f"--secret={secret}", f"--parent-pid={os.getpid()}"]
    killed = n_oom_kills()
    # As if it were started on the supervisor's host: in its own session, without standard input.
    process = subprocess.Popen(
        command, env=env, cwd=code, stdin=subprocess.DEVNULL, pass_fds=[secret], start_new_session=True
    )
    os.close(secret)
    threading.Thread(target=follow_orders, args=(process, stdin), daemon=True).start()
    code_or_signal = process.wait()
    if code_or_signal == -signal.SIGKILL and n_oom_kills() > killed:
        print("the kernel was out of memory and killed it", file=sys.stderr, flush=True)
    os._exit(code_or_signal if code_or_signal >= 0 else 128 - code_or_signal)  # the thread still reads


main(stdin)  # type: ignore[name-defined]  # noqa: F821 - what started this gave it
