"""What streaming costs the supervisor, and whether clients that read nothing delay others.

    python bench/streams.py [--streams 64] [--rate 50] [--seconds 10] [--rounds 3] [--slow 8] [--name NAME] [--save]

A supervisor with two daemons that load the demo model and compute nothing (paced_daemon.py), so that every stream gets
--rate tokens a second.  Clients are this process, over raw sockets.  Cost: CPU time of the supervisor's process while
--streams chat completions stream, in cores and microseconds a token; target: 64 streams at 50 tokens/s below 0.6 cores.
Slow readers: time to the first byte of short requests beside --slow streams that read nothing, in turns with as many
that read all; target: the same within what is measured.  --save writes bench/results/streams-NAME.json.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import time
from functools import partial
from urllib.parse import urlsplit

import psutil
from records import machine, save
from services import DEMO, paced_python, supervisor

from lucevisor.model.gguf_files import open_model
from lucevisor.text.tokenizer import Tokenizer

TEXT = "The function os.path.join joins path components with one separator, and csv.reader reads rows of a file.\n"
WARM_S = 2.0
ENDLESS = 100_000  # tokens; more than any window takes


def configuration(options, directory):
    """A TOML file for two groups whose daemons compute nothing."""
    python = paced_python(directory)
    ids = Tokenizer.from_gguf(open_model([DEMO]).metadata).encode(TEXT)
    env = f'{{PACED_STEP_S = "{1 / options.rate / 2:.6f}", PACED_IDS = "{",".join(map(str, ids))}"}}'
    group = f'backend = "cpu"\nthreads = 1\npython = "{python}"\nenv = {env}\n'
    path = directory / "streams.toml"
    path.write_text(f"""[model]
path = "{DEMO}"
[groups.g0]
{group}
[groups.g1]
{group}
[placement]
target_devices = ["g0:0", "g1:0"]
target_layer_split = [0.5, 0.5]
[engine]
max_sequences = {options.streams}
[draft]
kind = "off"
[server]
port = 0
""")
    return path


class Client:
    """A streamed chat completion over a socket; counts events, without JSON."""

    def __init__(self, url, n_tokens, receive_bytes=None):
        self.address = urlsplit(url)
        self.n_tokens = n_tokens
        self.receive_bytes = receive_bytes
        self.n_events = 0
        self.first_s = None

    async def open(self):
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "What does os.path.join do?"}],
                "max_tokens": self.n_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        sock = socket.socket()
        if self.receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.address.hostname, self.address.port))
        self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=self.receive_bytes or 2**16)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.address.netloc}\r\nConnection: close\r\n"
        self.started = time.perf_counter()
        self.writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    async def read(self):
        while data := await self.reader.read(2**16):
            if self.first_s is None:
                if not data.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(data.decode())
                self.first_s = time.perf_counter() - self.started
            self.n_events += data.count(b"data: ")

    async def close(self):
        self.writer.transport.abort()
        await asyncio.sleep(0)


async def cost(pid, url, options):
    """Cores and microseconds a token of the supervisor, and tokens/s of a stream."""
    clients = [Client(url, ENDLESS) for _ in range(options.streams)]
    for client in clients:
        await client.open()
    tasks = [asyncio.create_task(client.read()) for client in clients]
    await asyncio.sleep(WARM_S)
    process = psutil.Process(pid)
    before, n_before, started = process.cpu_times(), sum(c.n_events for c in clients), time.perf_counter()
    await asyncio.sleep(options.seconds)
    after, n_after, elapsed = process.cpu_times(), sum(c.n_events for c in clients), time.perf_counter() - started
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        await client.close()
    cpu_s = after.user + after.system - before.user - before.system
    n = n_after - n_before
    return {
        "cores": round(cpu_s / elapsed, 3),
        "us a token": round(1e6 * cpu_s / n, 1),
        "tokens/s of a stream": round(n / elapsed / options.streams, 2),
        "of it system": round((after.system - before.system) / cpu_s, 2),
    }


async def first_bytes(url, options, reading):
    """Seconds to the first byte of short requests, one after the other, beside --slow streams."""
    beside = [Client(url, ENDLESS, receive_bytes=None if reading else 4096) for _ in range(options.slow)]
    for client in beside:
        await client.open()
    tasks = [asyncio.create_task(client.read()) for client in beside if reading]
    await asyncio.sleep(WARM_S)
    found, end = [], time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        client = Client(url, 2)
        await client.open()
        await client.read()
        await client.close()
        found.append(client.first_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in beside:
        await client.close()
    await asyncio.sleep(1.0)
    return found


async def bench(pid, url, options):
    costs = []
    for number in range(options.rounds):
        costs.append(await cost(pid, url, options))
        print(f"round {number + 1}: {costs[-1]}")
        await asyncio.sleep(1.0)
    times = {"beside readers": [], "beside slow readers": []}
    for _ in range(options.rounds):
        for arm, found in times.items():
            found += await first_bytes(url, options, arm == "beside readers")
    first = {}
    for arm, found in times.items():
        cuts = statistics.quantiles(found, n=20, method="inclusive")
        first[arm] = {"n": len(found), "p50_ms": round(1e3 * cuts[9], 2), "p95_ms": round(1e3 * cuts[18], 2)}
    cores = statistics.median(each["cores"] for each in costs)
    return {"cost": costs, "median cores": cores, "time to first byte": first}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow", type=int, default=8)
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    before = machine()
    with supervisor("streams", partial(configuration, options)) as status:
        found = asyncio.run(bench(status["pid"], status["url"], options))
    conditions = {
        "streams": options.streams,
        "asked rate": options.rate,
        "seconds": options.seconds,
        "rounds": options.rounds,
        **before,
        "load average after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(found, indent=1))
    if options.save:
        save(f"streams-{options.name}", {"conditions": conditions, **found})


if __name__ == "__main__":
    main()
