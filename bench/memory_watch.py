"""Memory of processes and devices while something else runs: free bytes of GPUs, peaks of daemons."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

POLL_S = 0.1
LOOKS_A_DEVICE = 3
"""Devices are asked on every third look: the question takes a lock of the driver, and what they hand out they keep."""
WATCHER = """
import sys, torch
for line in sys.stdin:
    i = int(line)
    torch.zeros(1, device=f"cuda:{i}")
    print(torch.cuda.mem_get_info(i)[0], flush=True)
"""


class Watcher:
    """Free bytes of GPUs, asked of a process that holds a context on each and nothing else."""

    def __init__(self, indices):
        self.indices = sorted(set(indices))
        self._process = self._spawn() if self.indices else None
        self.start = self.free()
        self.least = dict(self.start)
        self.contexts = {}

    @staticmethod
    def _spawn():
        return subprocess.Popen(
            [sys.executable, "-c", WATCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @staticmethod
    def _ask(process, i):
        process.stdin.write(f"{i}\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def free(self):
        return {i: self._ask(self._process, i) for i in self.indices}

    def context_bytes(self):
        """What a process takes on each device before it does anything: the loss when one more comes."""
        other = self._spawn() if self.indices else None
        out = {}
        for i in self.indices:
            before = self.free()[i]
            self._ask(other, i)
            out[i] = before - self.free()[i]
        if other is not None:
            other.stdin.close()
            other.wait()
        return out

    def look(self):
        for i, n in self.free().items():
            self.least[i] = min(self.least[i], n)

    def close(self):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()


class Poll:
    """Looks at daemons' memory, and at devices, again and again from a thread."""

    def __init__(self, watcher):
        self.watcher, self.pids, self.peak = watcher, {}, {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        n = 0
        while not self._stop.wait(POLL_S):
            n += 1
            for group, pid in list(self.pids.items()):
                self.note(group, pid)
            if n % LOOKS_A_DEVICE == 0:
                self.watcher.look()

    def note(self, group, pid):
        seen = self.peak.setdefault(group, {})
        for key, n_bytes in resident(pid).items():
            seen[key] = max(seen.get(key, 0), n_bytes)

    def close(self):
        self._stop.set()
        self._thread.join()


def resident(pid):
    """Resident bytes of a process now, its peak, and its own (anonymous) part; nothing when it is gone."""
    names = {"VmHWM": "peak_bytes", "VmRSS": "resident_bytes", "RssAnon": "anonymous_bytes"}
    with contextlib.suppress(OSError):
        rows = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {names[row[0][:-1]]: int(row[1]) * 1024 for row in rows if row and row[0][:-1] in names}
    return {}
