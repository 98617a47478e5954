"""A slow link in place of loopback: runs a command in a network namespace whose packets take a set time.

    python bench/slow_link.py --latency-ms 1 [--mbyte-s 1250] -- COMMAND ...

Needs root and `ip` (iproute2), and no `tc netem`, which few small kernels have.  All that the command and its children
send to 127.0.0.0/8 goes through a TUN device to this process, which holds each packet for the latency, and one after
the other for their bytes where a speed is given.  The kernel hands over up to 64 KiB at once, as to a network card.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import IO

from namespaces import LIBC, delete, inside, ip

NAMESPACE, DEVICE, TABLE = f"sca-slow-{os.getpid()}", "slow0", "100"
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
PR_SET_TIMERSLACK = 29
HEADER_BYTES = 10  # of virtio, in front of a packet
LARGEST = HEADER_BYTES + 65_536


def set_parameter(interface: str, name: str, value: int) -> None:
    with open(f"/proc/sys/net/ipv4/conf/{interface}/{name}", "w") as parameter:
        parameter.write(str(value))


def open_tun() -> int:
    """Open the device, in this namespace."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    set_parameter(DEVICE, "route_localnet", 1)
    set_parameter(DEVICE, "accept_local", 1)
    set_parameter(DEVICE, "rp_filter", 0)
    set_parameter("all", "rp_filter", 0)
    return tun


def make_link() -> int:
    """Make the namespace, in which loopback addresses are reached through the device; return its descriptor."""
    ip("netns", "add", NAMESPACE)
    with inside(NAMESPACE):
        tun = open_tun()
        ip("link", "set", "lo", "up")
        ip("link", "set", DEVICE, "up", "mtu", "1500", "txqueuelen", "10000")
        ip("route", "add", "127.0.0.0/8", "dev", DEVICE, "src", "127.0.0.1", "table", TABLE)
        ip("rule", "add", "pref", "1", "dev", DEVICE, "lookup", "local")
        ip("rule", "add", "pref", "2", "to", "127.0.0.0/8", "lookup", TABLE)
        ip("rule", "add", "pref", "3", "lookup", "local")
        ip("rule", "del", "pref", "0")
    return tun


def relay(tun: int, latency_s: float, bytes_per_s: float, done: int) -> int:
    """Pass packets on until ``done`` is readable; returns how many."""
    waiting: deque[tuple[float, bytes]] = deque()
    free_at, n_packets = 0.0, 0
    LIBC.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else every wait is 50 us longer
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        ready = select.select([tun, done], [], [], left)[0]
        if done in ready:
            return n_packets
        if tun in ready:
            try:
                for _ in range(64):
                    packet = os.read(tun, LARGEST)
                    now = time.monotonic()
                    free_at = max(now, free_at) + (len(packet) / bytes_per_s if bytes_per_s else 0.0)
                    waiting.append((free_at + latency_s, packet))
            except BlockingIOError:
                pass
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            os.write(tun, waiting.popleft()[1])
            n_packets += 1


def run(command: Sequence[str], latency_s: float, bytes_per_s: float = 0.0, stdout: IO[str] | None = None) -> int:
    """Run a command behind the link; return its exit status."""
    try:
        tun = make_link()
        child = subprocess.Popen(["ip", "netns", "exec", NAMESPACE, *command], stdout=stdout)
        relay(tun, latency_s, bytes_per_s, os.pidfd_open(child.pid))
        return child.wait()
    finally:
        delete(NAMESPACE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, required=True)
    parser.add_argument("--mbyte-s", type=float, default=0.0, help="0: as fast as it goes")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    return run(options.command, options.latency_ms / 1e3, options.mbyte_s * 1e6)


if __name__ == "__main__":
    sys.exit(main())
