"""The far ends of bench/hop.py: one process each, ``python hop_peers.py KIND ADDRESS BYTES``.

raw: ADDRESS is a descriptor; reads BYTES, writes BYTES.  sink: the same, but writes one.  link: a daemon without a
model at a descriptor; rows: one that hands rows back.  zmq, grpc: ADDRESS is a path; echo.
"""

import os
import platform
import select
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

from lucevisor.model.values import Backend
from lucevisor.protocol.loading import Hello, Loaded
from lucevisor.protocol.messages import PROTOCOL_VERSION, Shutdown
from lucevisor.protocol.steps import Sampled, Step, StepResult
from lucevisor.protocol.tcp import Credentials
from lucevisor.protocol.tcp_buffer import RowsEndpoint
from lucevisor.protocol.transport import BlockingLink


def raw(address, n_bytes, n_answered=None):
    sock = socket.socket(fileno=int(address))
    buffer = memoryview(bytearray(n_bytes))
    while True:
        n = 0
        while n < n_bytes:
            got = sock.recv_into(buffer[n:])
            if got == 0:
                return
            n += got
        sock.sendall(buffer[:n_answered])


def sink(address, n_bytes):
    raw(address, n_bytes, n_answered=1)


def await_rows(buffer, region, step_id):
    buffer.awaited(True)
    while not buffer.rung(region, step_id):
        select.select(buffer.wake_fds, [], [])
        buffer.drain()
    buffer.awaited(False)


def rows(address, _):
    link = BlockingLink(socket.socket(fileno=int(address)))
    load = greet(link)
    there, back = RowsEndpoint(link, credentials=Credentials(bytes(32))).open(load.message.arenas, load.fds)
    link.send(Loaded([], {}, 0.0))
    step_id = 1
    while True:
        there.awaited(True)
        while not there.rung(step_id % 2, step_id):
            if link.fileno() in select.select([*there.wake_fds, link.fileno()], [], [])[0]:
                return
            there.drain()
        there.awaited(False)
        back.region(step_id % 2)[:] = there.region(step_id % 2)
        back.ring(step_id % 2, step_id, back.plan.region_bytes)
        step_id += 1


def greet(link):
    """Say hello, and return the Load."""
    link.send(
        Hello(
            protocol=PROTOCOL_VERSION,
            source_hash="",
            pid=os.getpid(),
            python=platform.python_version(),
            executable=sys.executable,
            torch="",
            backend=Backend.CPU,
            devices=[],
            host_total_bytes=0,
            packages={},
        )
    )
    return link.receive()


def link(address, _):
    link = BlockingLink(socket.socket(fileno=int(address)))
    load = greet(link)
    arenas = RowsEndpoint(link, credentials=Credentials(bytes(32))).open(load.message.arenas, load.fds)
    link.send(Loaded([], {}, 0.0))
    while (frame := link.receive()) is not None:
        match frame.message:
            case Step() as step if len(frame.payload):
                result = StepResult(step.step_id, 0, segments=[("rows", [len(frame.payload) // 4])])
                link.send(result, payload=[frame.payload])
            case Step() as step:
                if arenas:
                    await_rows(arenas[0], step.region, step.step_id)
                if len(arenas) > 1:  # rows in, rows out: as little as a stage can do
                    arenas[1].region(step.region)[:] = arenas[0].region(step.region)
                    arenas[1].ring(step.region, step.step_id, arenas[1].plan.region_bytes)
                link.send(StepResult(step.step_id, 0, [Sampled(s.sequence, 1) for s in step.slices]))
            case Shutdown():
                return


def zmq(address, _):
    import zmq

    context = zmq.Context()
    sock = context.socket(zmq.PAIR)
    sock.connect(f"ipc://{address}")
    while True:
        frame = sock.recv(copy=False)
        if len(frame) == 0:
            break
        sock.send(frame, copy=False)
    sock.close()
    context.term()


def grpc(address, _):
    import grpc

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(1), options=options)
    echo = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("hop", {"echo": echo})])
    server.add_insecure_port(f"unix:{address}")
    server.start()
    sys.stdin.read()  # the parent closes it
    server.stop(None)


if __name__ == "__main__":
    {"raw": raw, "sink": sink, "rows": rows, "link": link, "zmq": zmq, "grpc": grpc}[sys.argv[1]](
        sys.argv[2], int(sys.argv[3])
    )
