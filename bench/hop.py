"""What a hop costs: supervisor to a daemon process and back, beside raw sockets, ZeroMQ and gRPC in the same run.

    python bench/hop.py [--rounds 20] [--cores free|same|apart] [--veth] [--service] [--save | --json PATH]

Every contender has its own child process; rounds of all contenders alternate, so that drift of the machine hits all
alike.  Times are per round trip, after one warm-up round that is not counted.  --cores: where the kernel may run them:
anywhere, all on core 0, or this process on core 0 and the children on core 1.  "link, TCP rows" is transport = "tcp":
links and rows over the loopback interface, with a copy of the rows for the supervisor on the way back.  One way, rows
are sent ahead of their answers; those over TCP lie in their regions already, as a device leaves them there.  --save
writes bench/results/hop-CORES.json.  --service: milliseconds a token of the demo over two groups by each transport, in
turns, instead.  --veth: TCP goes from one network namespace to another, over a virtual cable with frames of 1,500
bytes, as between hosts; needs root.  ZeroMQ and gRPC are left out where they are not installed.
"""

import argparse
import asyncio
import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import namespaces
import uvloop
from msgspec.structs import replace
from records import machine, save, write_json
from services import ROOT, running

from lucevisor.cli.bench import Case, tokens_per_s
from lucevisor.model.values import Dtype
from lucevisor.protocol.arena import Arena, descriptors
from lucevisor.protocol.frames import encode
from lucevisor.protocol.loading import ArenaPlan, Load, PoolSizes, RowsConnection
from lucevisor.protocol.messages import Role
from lucevisor.protocol.steps import Slice, Step
from lucevisor.protocol.tcp import LOOPBACK, Credentials
from lucevisor.protocol.tcp_buffer import RowsEndpoint
from lucevisor.protocol.transport import BlockingLink, Link

PEERS = Path(__file__).with_name("hop_peers.py")
EMPTY = 55  # bytes the raw contenders send for an empty step: about the length of its frame
SIZES = {"10 KiB": 10 * 1024, "5 MiB": 5 * 1024 * 1024}
N_ROWS, IN_FLIGHT = 512, 4  # of 5,120 bfloat16 in 5 MiB; regions of a boundary
ONE_WAY = f"5 MiB rows, one way, {IN_FLIGHT} in flight"
TARGET_RATIO, TARGET_EXTRA_US = 1.5, 30.0
OURS, THEIRS = "sca-hop0", "sca-hop1"


class Host:
    """Where TCP connections of this process and its children begin."""

    address, children = LOOPBACK, ""  # a namespace; "": this one


class Child:
    """A peer process over a socketpair (``sock``) or a socket path."""

    def __init__(self, kind, n_bytes=0, path="", cpu=None, tcp=False):
        self.sock = None
        fds = []
        if not path:
            self.sock, theirs = tcp_pair() if tcp else socket.socketpair()
            path, fds = str(theirs.fileno()), [theirs.fileno()]
        self.process = subprocess.Popen(
            [sys.executable, str(PEERS), kind, path, str(n_bytes)],
            pass_fds=fds,
            stdin=subprocess.PIPE,
            preexec_fn=lambda: self._prepare(cpu),
        )
        if fds:
            theirs.close()

    @staticmethod
    def _prepare(cpu):
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        if Host.children:
            namespaces.enter(Host.children)

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def tcp_pair():
    with socket.create_server((Host.address, 0)) as server:
        with namespaces.inside(Host.children) if Host.children else contextlib.nullcontext():
            theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    for sock in (ours, theirs):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return ours, theirs


class Raw:
    """Blocking sockets on both sides, nothing decoded: the least that Python can do."""

    def __init__(self, n_bytes, cpu, *, tcp=False):
        self.child = Child("raw", n_bytes, cpu=cpu, tcp=tcp)
        self.data = os.urandom(n_bytes)
        self.buffer = memoryview(bytearray(n_bytes))

    async def open(self):
        pass

    async def round(self, n):
        times, sock, buffer, data = [], self.child.sock, self.buffer, self.data
        for _ in range(n):
            start = time.perf_counter_ns()
            self._exchange(sock, data, buffer)
            times.append(time.perf_counter_ns() - start)
        return times

    @staticmethod
    def _exchange(sock, data, buffer):
        sock.sendall(data)
        got = 0
        while got < len(buffer):
            got += sock.recv_into(buffer[got:])

    async def close(self):
        self.child.sock.close()
        self.child.end()


class RawOneWay:
    """Rows over a raw TCP connection, some ahead of the bytes that acknowledge them."""

    def __init__(self, n_bytes, cpu):
        self.child = Child("sink", n_bytes, cpu=cpu, tcp=True)
        self.data = os.urandom(n_bytes)

    async def open(self):
        pass

    async def round(self, n):
        start, answered, sock = time.perf_counter_ns(), 0, self.child.sock
        for i in range(n):
            if i - answered == IN_FLIGHT:
                answered += len(sock.recv(IN_FLIGHT))
            sock.sendall(self.data)
        while answered < n:
            answered += len(sock.recv(IN_FLIGHT))
        return [(time.perf_counter_ns() - start) / n]

    async def close(self):
        self.child.sock.close()
        self.child.end()


CREDENTIALS = Credentials(bytes(32))


def open_buffers(n_bytes, n_regions, *, tcp, tokens=False):
    """Two boundaries, to the child and back: what opens them here, our ends, and what the child is told."""
    plans = [ArenaPlan(i, n_bytes, n_regions, tokens=tokens) for i in range(2)]
    if not tcp:
        arenas = [Arena.create(plan) for plan in plans]
        return None, arenas, plans
    supervisor = SimpleNamespace(send=lambda *_, **__: None)  # who wants no copies
    endpoint = RowsEndpoint(supervisor, Host.address, CREDENTIALS)
    buffers = endpoint.open([replace(plan, connection=RowsConnection(1)) for plan in plans], [])
    return endpoint, buffers, [replace(plan, connection=RowsConnection(2, endpoint.address)) for plan in plans]


def await_rows(buffer, region, step_id):
    buffer.awaited(True)
    while not buffer.rung(region, step_id):
        select.select(buffer.wake_fds, [], [])
        buffer.drain()
    buffer.awaited(False)


class OurRows:
    """From ring to ring: what a hop is for two stages of a posted step, without links and copies."""

    def __init__(self, n_bytes, cpu, *, tcp):
        self.child, self.tcp, self.n_bytes = Child("rows", cpu=cpu, tcp=tcp), tcp, n_bytes
        self.rows, self.step_id = os.urandom(n_bytes), 0
        self.endpoint, self.buffers, self.plans = open_buffers(n_bytes, 2, tcp=tcp, tokens=True)

    async def open(self):
        self.link = BlockingLink(self.child.sock, role=Role.SUPERVISOR)
        self.link.receive()
        load = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], self.plans, PoolSizes(1, 1, 1), 1, 1)
        self.link.send(load, fds=[] if self.tcp else descriptors(self.buffers))
        self.link.receive()

    async def round(self, n):
        times = []
        for _ in range(n):
            self.step_id += 1
            region = self.step_id % 2
            start = time.perf_counter_ns()
            self.buffers[0].region(region)[:] = self.rows
            self.buffers[0].ring(region, self.step_id, self.n_bytes)
            await_rows(self.buffers[1], region, self.step_id)
            times.append(time.perf_counter_ns() - start)
        return times

    async def close(self):
        self.link.close()
        self.child.end()
        for buffer in self.buffers:
            buffer.close()
        if self.endpoint is not None:
            self.endpoint.close()


class OurOneWay:
    """Rows from region to region, some ahead of their answers; blocking links on both sides."""

    def __init__(self, n_bytes, cpu, *, tcp):
        self.child, self.tcp, self.n_bytes = Child("link", cpu=cpu, tcp=tcp), tcp, n_bytes
        self.rows = os.urandom(n_bytes)
        self.endpoint, self.buffers, self.plans = open_buffers(n_bytes, IN_FLIGHT, tcp=tcp)
        self.step_id = 0

    async def open(self):
        self.link = BlockingLink(self.child.sock, role=Role.SUPERVISOR)
        self.link.receive()
        plans, sizes = self.plans[:1], (PoolSizes(1, 1, 1), 1, 1)
        fds = [] if self.tcp else descriptors(self.buffers[:1])
        self.link.send(Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], plans, *sizes), fds=fds)
        self.link.receive()

    async def round(self, n):
        start, answered = time.perf_counter_ns(), 0
        for i in range(n):
            if i - answered == IN_FLIGHT:
                self.link.receive()
                answered += 1
            self.step_id += 1
            region = self.step_id % IN_FLIGHT
            if not self.tcp:
                self.buffers[0].region(region)[:] = self.rows
            self.link.send(Step(self.step_id, region))
            self.buffers[0].ring(region, self.step_id, self.n_bytes)
        while answered < n:
            self.link.receive()
            answered += 1
        return [(time.perf_counter_ns() - start) / n]

    async def close(self):
        self.link.close()
        self.child.end()
        for buffer in self.buffers:
            buffer.close()
        if self.endpoint is not None:
            self.endpoint.close()


class OurLink:
    """aio.Link here, BlockingLink there.  ``how``: empty, decode, arena, tcp, inline."""

    def __init__(self, how, n_bytes, cpu):
        self.how = how
        self.child = Child("link", cpu=cpu, tcp=how == "tcp")
        self.rows = os.urandom(n_bytes)
        self.endpoint, self.arenas, self.plans = None, [], []
        if how in ("arena", "tcp"):
            self.endpoint, self.arenas, self.plans = open_buffers(n_bytes, 2, tcp=how == "tcp")
        self.times, self.step_id = [], 0

    async def open(self):
        loop = asyncio.get_running_loop()
        self.ready = loop.create_future()
        self.link = Link(self.child.sock, self._on_frame, self._on_closed)
        await self.ready  # hello
        self.ready = loop.create_future()
        load = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], self.plans, PoolSizes(1, 1, 1), 1, 1)
        self.link.send(load, fds=descriptors(self.arenas) if self.how == "arena" else [])
        await self.ready  # loaded
        self.left = 0

    def _on_closed(self, reason):
        if not self.ready.done():
            self.ready.set_exception(reason)

    def _on_frame(self, frame):
        now = time.perf_counter_ns()
        if frame.kind.name == "ROWS_COPY":
            return
        if frame.kind.name != "STEP_RESULT":
            self.ready.set_result(None)
            return
        if self.arenas:  # the next stage would make a tensor on this view
            await_rows(self.arenas[1], frame.message.step_id % 2, frame.message.step_id)
            view = self.arenas[1].region(frame.message.step_id % 2)
            now = time.perf_counter_ns()
            assert view[-1] == self.rows[-1]
        elif self.how == "inline":
            assert frame.payload[-1] == self.rows[-1]
        self.times.append(now - self.start)
        self.left -= 1
        if self.left:
            self._step()
        else:
            self.ready.set_result(None)

    def _step(self):
        self.step_id += 1
        n = self.step_id
        self.start = time.perf_counter_ns()
        if self.how == "inline":
            self.link.send(Step(n, 0), payload=[self.rows])
        elif self.how == "decode":
            self.link.send(encode(Step(n, 0, slices=[Slice(i, 1000 + n, [n], True) for i in range(8)])))
        else:
            if self.arenas:
                self.arenas[0].region(n % 2)[:] = self.rows
                self.arenas[0].ring(n % 2, n, len(self.rows))
            self.link.send(encode(Step(n, n % 2)))

    async def round(self, n):
        self.times, self.left = [], n
        self.ready = asyncio.get_running_loop().create_future()
        self._step()
        await self.ready
        return self.times

    async def close(self):
        self.link.close()
        self.child.end()
        for arena in self.arenas:
            arena.close()
        if self.endpoint is not None:
            self.endpoint.close()


class OurBlockingLink:
    """BlockingLink on both sides: what the codec costs without an event loop."""

    def __init__(self, cpu):
        self.child = Child("link", cpu=cpu)

    async def open(self):
        self.link = BlockingLink(self.child.sock, role=Role.SUPERVISOR)
        self.link.receive()
        self.link.send(Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(1, 1, 1), 1, 1))
        self.link.receive()

    async def round(self, n):
        times = []
        for i in range(n):
            start = time.perf_counter_ns()
            self.link.send(Step(i, 0))
            self.link.receive()
            times.append(time.perf_counter_ns() - start)
        return times

    async def close(self):
        self.link.close()
        self.child.end()


class Zmq:
    """PAIR over ipc; zmq.asyncio here, blocking there."""

    def __init__(self, n_bytes, cpu, directory):
        import zmq
        import zmq.asyncio

        self.context = zmq.asyncio.Context()
        self.sock = self.context.socket(zmq.PAIR)
        path = f"{directory}/zmq-{n_bytes}"
        self.sock.bind(f"ipc://{path}")
        self.child = Child("zmq", path=path, cpu=cpu)
        self.data = os.urandom(n_bytes)

    async def open(self):
        await self.round(1)

    async def round(self, n):
        times = []
        for _ in range(n):
            start = time.perf_counter_ns()
            await self.sock.send(self.data, copy=False)
            await self.sock.recv(copy=False)
            times.append(time.perf_counter_ns() - start)
        return times

    async def close(self):
        await self.sock.send(b"")
        self.child.end()
        self.sock.close()
        self.context.term()


class Grpc:
    """A unary call over a Unix socket with raw bytes; grpc.aio here, a thread pool of one there."""

    def __init__(self, n_bytes, cpu, directory):
        self.path = f"{directory}/grpc-{n_bytes}"
        self.child = Child("grpc", path=self.path, cpu=cpu)
        self.data = os.urandom(n_bytes)

    async def open(self):
        import grpc.aio

        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=options)
        self.call = self.channel.unary_unary("/hop/echo")
        await self.call(self.data, wait_for_ready=True)

    async def round(self, n):
        times = []
        for _ in range(n):
            start = time.perf_counter_ns()
            await self.call(self.data)
            times.append(time.perf_counter_ns() - start)
        return times

    async def close(self):
        await self.channel.close()
        self.child.end()


def contenders(cpu, directory):
    """metric -> contender -> (object, round trips a round); the first of a metric is the base of the ratios."""
    here = installed()
    peers = [("ZeroMQ", Zmq)] * ("zmq" in here) + [("gRPC", Grpc)] * ("grpc" in here)
    metrics = {
        "empty step": {
            "raw socketpair": (Raw(EMPTY, cpu), 200),
            "raw TCP": (Raw(EMPTY, cpu, tcp=True), 200),
            "link": (OurLink("empty", 0, cpu), 200),
            "link, 8 sequences": (OurLink("decode", 0, cpu), 200),
            "link, both ends blocking": (OurBlockingLink(cpu), 200),
            **{name: (peer(EMPTY, cpu, directory), 200 if name == "ZeroMQ" else 100) for name, peer in peers},
        }
    }
    for name, n_bytes in SIZES.items():
        n = 100 if n_bytes < 100_000 else 10
        metrics[f"{name} rows, both ways"] = {
            "raw socketpair": (Raw(n_bytes, cpu), n),
            "raw TCP": (Raw(n_bytes, cpu, tcp=True), n),
            "link, arena": (OurLink("arena", n_bytes, cpu), n),
            "link, TCP rows": (OurLink("tcp", n_bytes, cpu), n),
            "link, inline": (OurLink("inline", n_bytes, cpu), n),
            **{peer_name: (peer(n_bytes, cpu, directory), n) for peer_name, peer in peers},
        }
        metrics[f"{name} rows, ring to ring and back"] = {
            "raw TCP": (Raw(n_bytes, cpu, tcp=True), n),
            "arena": (OurRows(n_bytes, cpu, tcp=False), n),
            "TCP rows": (OurRows(n_bytes, cpu, tcp=True), n),
        }
    n_bytes = SIZES["5 MiB"]
    metrics[ONE_WAY] = {
        "raw TCP": (RawOneWay(n_bytes, cpu), 40),
        "arena": (OurOneWay(n_bytes, cpu, tcp=False), 40),
        "TCP rows": (OurOneWay(n_bytes, cpu, tcp=True), 40),
    }
    return metrics


def installed():
    """The contenders' packages that are here: module -> distribution."""
    packages = {"uvloop": "uvloop", "msgspec": "msgspec", "zmq": "pyzmq", "grpc": "grpcio"}
    return {module: name for module, name in packages.items() if find_spec(module) is not None}


def conditions(cores):
    versions = {name: version(name) for name in installed().values()}
    return {**machine(), "processes on cores": cores, **versions}


async def measure(rounds, cpu):
    """{metric: {contender: times in us}}"""
    with tempfile.TemporaryDirectory() as directory:
        metrics = contenders(cpu, directory)
        everyone = [(metric, name, *entry) for metric, group in metrics.items() for name, entry in group.items()]
        for _, _, contender, _ in everyone:
            await contender.open()
        times = {metric: {name: [] for name in group} for metric, group in metrics.items()}
        for turn in range(rounds + 1):
            for metric, name, contender, n in everyone:
                found = await contender.round(n)
                if turn:  # the first round warms up
                    times[metric][name] += [t / 1000 for t in found]
        for _, _, contender, _ in everyone:
            await contender.close()
    return times


async def measure_service(rounds):
    """{transport: ms a token}, one stream of the demo halved over two cpu groups, without drafts."""
    config, found = ROOT / "etc" / "demo.toml", {"shared_memory": [], "tcp": []}
    async with contextlib.AsyncExitStack() as stack:
        services = {}
        for transport in found:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hop-"))
            settings = [f"groups.{group}.transport={transport}" for group in ("left", "right")]
            services[transport] = await stack.enter_async_context(
                running(config, directory, [*settings, "draft.kind=off"])
            )
        for turn in range(rounds + 1):
            for transport, service in services.items():
                speed = await tokens_per_s(service, Case(answer=200), turn)
                found[transport] += [1000 / speed] if turn else []
    return found


def summarise(times):
    rows = []
    for metric, group in times.items():
        base = statistics.median(next(iter(group.values())))
        for name, found in group.items():
            p50, p90 = statistics.median(found), statistics.quantiles(found, n=10)[-1]
            row = {"metric": metric, "contender": name, "min_us": min(found), "p50_us": p50, "p90_us": p90}
            row["ratio"] = p50 / base
            rows.append(row | ({"rows_per_s": N_ROWS / p50 * 1e6} if metric == ONE_WAY else {}))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cores", choices=["free", "same", "apart"], default="free")
    parser.add_argument("--veth", action="store_true", help="TCP between two network namespaces")
    parser.add_argument("--service", action="store_true", help="the demo over each transport instead")
    parser.add_argument("--save", action="store_true", help="write bench/results/hop-CORES.json")
    parser.add_argument("--json", type=Path, help="write to this file")
    options = parser.parse_args()
    cpu = {"free": None, "same": 0, "apart": 1}[options.cores]
    if cpu is not None:
        os.sched_setaffinity(0, {0})
    where = conditions(options.cores)
    if options.service:
        times = asyncio.run(measure_service(options.rounds))
        medians = {transport: statistics.median(found) for transport, found in times.items()}
        print({transport: f"{found:.3f} ms a token" for transport, found in medians.items()})
        print(f"TCP adds {(medians['tcp'] - medians['shared_memory']) * 1000:+.0f} us a token of two hops")
        if options.json is not None:
            write_json(options.json, {"conditions": where, "rounds": options.rounds, "ms_a_token": times})
        return
    with contextlib.ExitStack() as stack:
        if options.veth:
            Host.address, _ = stack.enter_context(namespaces.cable(OURS, THEIRS))
            Host.children = THEIRS
            stack.enter_context(namespaces.inside(OURS))
            where |= {"TCP": "veth between two namespaces, MTU 1500"}
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        times = runner.run(measure(options.rounds, cpu))
    rows = summarise(times)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(f"{'metric':48} | {'p50':>9} | {'p90':>9} | ratio to raw")
    for row in rows:
        label = f"{row['metric']}: {row['contender']}"
        print(f"{label:48} | {row['p50_us']:6.0f} us | {row['p90_us']:6.0f} us | {row['ratio']:.2f}")
    found = {row["contender"]: row["p50_us"] for row in rows if row["metric"] == "empty step"}
    limit = TARGET_RATIO * found["raw socketpair"] + TARGET_EXTRA_US
    verdict = "met" if found["link"] <= limit else "missed"
    formula = f"{TARGET_RATIO} x raw + {TARGET_EXTRA_US:.0f} us = {limit:.0f} us"
    print(f"target, empty step: {found['link']:.0f} us <= {formula}: {verdict}")
    p50 = {(row["metric"], row["contender"]): row["p50_us"] for row in rows}
    decode = "10 KiB rows, ring to ring and back"
    added = (p50[decode, "TCP rows"] - p50[decode, "arena"]) / 2
    print(f"a hop of 10 KiB over TCP: {added:+.0f} us beside shared memory")
    speeds = {row["contender"]: row["rows_per_s"] for row in rows if row["metric"] == ONE_WAY}
    share = speeds["TCP rows"] / speeds["raw TCP"]
    print(", ".join(f"{name} {speed:,.0f} rows/s" for name, speed in speeds.items()) + f": {share:.0%} of raw TCP")
    least = {row["contender"]: row["min_us"] for row in rows if row["metric"] == ONE_WAY}
    print(f"of the fastest rounds, which other work disturbed least: {least['raw TCP'] / least['TCP rows']:.0%}")
    record = {"conditions": where, "rounds": options.rounds, "rows": rows, "limit_us": limit}
    if options.save:
        save(f"hop-{options.cores}", record)
    if options.json is not None:
        write_json(options.json, record)


if __name__ == "__main__":
    main()
