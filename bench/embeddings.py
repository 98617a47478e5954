"""Texts a second of an embedder, ours beside llama.cpp's server on the same processors.

    python bench/embeddings.py MODEL.gguf [--llama-server PATH] [--groups 1] [--texts 512] [--batch 64] [--clients 2]
        [--words 8 60] [--rounds 3] [--dtype bfloat16] [--name NAME] [--save]

Texts are runs of the words of docs/, `--words` of them, the same for both.  `--clients` each send `--batch` texts a
request to /v1/embeddings until all are answered, `--rounds` times, one server after the other in turn; the best round
counts, as other programs share the processors.  The cosines of the same texts say that both computed the same.  Both
get all cores.  --save writes bench/results/embeddings-NAME.json.
"""

import argparse
import asyncio
import contextlib
import math
import os
import random
import socket
import statistics
import subprocess
import time
from pathlib import Path

import aiohttp
from records import conditions, save
from services import ROOT, groups_toml, supervisor


def texts(n, shortest, longest, seed=0):
    """``n`` texts of real words."""
    words = " ".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").glob("*.md"))).split()
    rng = random.Random(seed)
    starts = [(rng.randrange(len(words) - longest), rng.randint(shortest, longest)) for _ in range(n)]
    return [" ".join(words[at : at + length]) for at, length in starts]


@contextlib.contextmanager
def llama_server(path, model, n_parallel):
    """llama.cpp's server for embeddings; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [path, "-m", model, "--embedding", "--port", str(port), "-t", str(os.cpu_count())]
    command += ["-c", str(512 * n_parallel), "-np", str(n_parallel), "-b", "2048", "-ub", "2048"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def until_ready(session, url):
    for _ in range(600):
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{url} does not come up")


async def measure(url, wanted, options):
    """Seconds for all texts, tokens of them, and their embeddings."""
    batches = [wanted[at : at + options.batch] for at in range(0, len(wanted), options.batch)]
    found, n_tokens, waiting = {}, 0, iter(range(len(batches)))

    async def client():
        nonlocal n_tokens
        for i in waiting:
            async with session.post(f"{url}/v1/embeddings", json={"input": batches[i]}) as answer:
                body = await answer.json()
                if answer.status != 200:
                    raise SystemExit(f"{url}: {body}")
            found[i] = [one["embedding"] for one in body["data"]]
            n_tokens += body["usage"]["prompt_tokens"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        await until_ready(session, url)
        async with session.post(f"{url}/v1/embeddings", json={"input": wanted[:8]}):
            began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(options.clients)))
        return time.monotonic() - began, n_tokens, [one for i in range(len(batches)) for one in found[i]]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--words", type=int, nargs=2, default=(8, 60))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def main():
    options = arguments()
    wanted, model = texts(options.texts, *options.words), str(options.model.resolve())
    options.model = model

    def config(folder):
        path = folder / "bench.toml"
        path.write_text(groups_toml(options) + f'[engine]\ndtype = "{options.dtype}"\n[server]\nport = 0\n')
        return path

    rounds, embeddings = {"lucevisor": [], "llama-server": []}, {}
    for _ in range(options.rounds):
        with supervisor("embeddings", config) as status:
            seconds, n_tokens, embeddings["lucevisor"] = asyncio.run(measure(status["url"], wanted, options))
        rounds["lucevisor"].append({"seconds": seconds, "tokens": n_tokens})
        if options.llama_server is None:
            continue
        with llama_server(str(options.llama_server), model, min(64, options.batch)) as url:
            seconds, n_tokens, embeddings["llama-server"] = asyncio.run(measure(url, wanted, options))
        rounds["llama-server"].append({"seconds": seconds, "tokens": n_tokens})
    record = {"conditions": conditions(), "options": {**vars(options), "llama_server": bool(options.llama_server)}}
    record["options"]["model"] = Path(model).name
    for name, found in rounds.items():
        if not found:
            continue
        best = min(found, key=lambda one: one["seconds"])
        rates = [options.texts / one["seconds"] for one in found]
        record[name] = {"texts/s": max(rates), "tokens/s": best["tokens"] / best["seconds"], "rounds": rates}
        print(f"{name}: {max(rates):.1f} texts/s, {best['tokens'] / best['seconds']:.0f} tokens/s, of "
              f"{', '.join(f'{rate:.1f}' for rate in rates)}")  # fmt: skip
    if len(embeddings) == 2:
        apart = [1 - cosine(a, b) for a, b in zip(*embeddings.values(), strict=True)]
        record["1 - cosine"] = {"median": statistics.median(apart), "max": max(apart)}
        print(f"1 - cosine between both: {statistics.median(apart):.1e} median, {max(apart):.1e} at most")
    if options.save:
        save(f"embeddings-{options.name}", record)


if __name__ == "__main__":
    main()
