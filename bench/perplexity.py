"""How far are the kernels' answers from float32?  Perplexity and greedy choices of every path that a device has.

    python bench/perplexity.py [--device cpu|cuda] [--model etc/demo/demo-qwen35-22m-q4_k_m.gguf] [--texts 16]
                               [--tokens 1024] [--text FILE] [--golden DIRECTORY] [--json PATH | --save] [--resume]

The model reads 16 texts that its training never saw (bench/data/demo-held-out.bin.xz: chats, of which only what the
assistant says counts), in float32 by plain torch and by each path in its own number format: in chunks of 512, in steps
of 32 rows (2 tokens of each text), of 16 rows and of one row (two texts), since other kernels run for each.  The
weights are those of the file, so what differs is rounding alone.  Printed for each: perplexity beside float32's on the
same texts (aim: within 0.5 %) with the standard error of the difference, and the share of tokens where both would
choose the same.  With --text, a model reads pieces of that file.  With --golden, the models with random weights there
read their own 72 ids: too few for the aim, their standard error is above it.  --resume leaves out the rows that the
file has.
"""

import argparse
import json
import lzma
import math
import os
import platform
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from daemons.device import prepare
from daemons.models.stage import LoadedStage
from daemons.ops import selection
from daemons.ops.cpu.compiler import CpuCompileError
from lucevisor.model.families import open_spec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan
from lucevisor.protocol.steps import OpenSequence, SamplingParams, SetPages, Slice, Step, ZeroState
from lucevisor.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "etc/demo/demo-qwen35-22m-q4_k_m.gguf"
HELD_OUT = Path(__file__).parent / "data/demo-held-out.bin.xz"
ROW_TOKENS = 1024
AIM = 0.005
MODES = {"chunks of 512": (512, 1), "32 rows": (2, 16), "16 rows": (1, 16), "1 row": (1, 1)}
"""Name -> tokens of a text in a step, and texts in a step."""
ONE_ROW_TEXTS = 2


@dataclass(frozen=True)
class Path_:
    """One way of computing; ``without``: functions of kernel selection that find nothing.  Plain torch on a GPU is
    launched kernel by kernel, so it has steps of many rows only.
    """

    name: str
    dtype: Dtype
    without: tuple[str, ...] = ()
    modes: tuple[str, ...] = tuple(MODES)


CPU_PATHS = (
    Path_("torch, bfloat16", Dtype.BFLOAT16, ("cpu_kernels",)),
    Path_("C++, bfloat16", Dtype.BFLOAT16),
)
CUDA_PATHS = (
    Path_("Triton and CUDA C++, bfloat16", Dtype.BFLOAT16),
    Path_("Triton, bfloat16", Dtype.BFLOAT16, ("_cuda_gemv",)),
    Path_("Triton and CUDA C++, float16", Dtype.FLOAT16),
    Path_("Triton, float16", Dtype.FLOAT16, ("_cuda_gemv",)),
    Path_("torch, bfloat16", Dtype.BFLOAT16, ("triton_reject_reason",), ("chunks of 512", "32 rows")),
    Path_("Triton, float32", Dtype.FLOAT32),
)
EXACT = Path_("torch, float32", Dtype.FLOAT32, ("triton_reject_reason", "cpu_kernels"))


def no_cpu_kernels():
    raise CpuCompileError("left out")


NOTHING = {
    "cpu_kernels": no_cpu_kernels,
    "triton_reject_reason": lambda device, dtype: "left out",
    "_cuda_gemv": lambda device, dtype: (None, ""),
}


def loaded(spec, path, backend, n_texts, n_tokens):
    """The whole model as one stage, for all texts at once."""
    kv_groups, n_pages = spec.kv_groups(), n_texts * -(-n_tokens // PAGE_TOKENS)
    pools = PoolSizes(
        n_pages if KvGroup.FULL in kv_groups else 0,
        n_pages if KvGroup.WINDOW in kv_groups else 0,
        n_texts if KvGroup.RECURRENT in kv_groups else 0,
    )
    layers = LayerRange(0, spec.n_layers)
    plan = StagePlan(0, [ShardPlan(0, layers)], source=None, target=None, embedding=True, output=True)
    files = [str(file) for file in spec.files.paths]
    load = Load(files, path.dtype, path.dtype, [plan], [], pools, n_texts, max(512, 2 * n_texts))
    with ExitStack() as stack:
        for name in path.without:
            stack.enter_context(patch.object(selection, name, NOTHING[name]))
        return LoadedStage.load(spec, plan, load, backend, lambda _: None)


@torch.inference_mode()
def read(stage, texts, mode):
    """Of each text and position: log-probability of the next token, and the most likely one."""
    (n, together), length = mode, len(texts[0])
    kv_groups = stage.spec.kv_groups()
    stage.reset()
    n_pages = -(-length // PAGE_TOKENS)
    for i in range(len(texts)):
        pages = [
            SetPages(i, s, 0, list(range(i * n_pages, i * n_pages + n_pages))) for s in kv_groups - {KvGroup.RECURRENT}
        ]
        states = [ZeroState(i)] if KvGroup.RECURRENT in kv_groups else []
        stage.apply([*states, OpenSequence(i, i, SamplingParams()), *pages])
    scores, choices = torch.zeros(len(texts), length - 1), torch.zeros(len(texts), length - 1, dtype=torch.int64)
    for first in range(0, len(texts), together):
        group = range(first, min(first + together, len(texts)))
        for at in range(0, length - 1, n):
            m = min(n, length - 1 - at)
            out = stage.forward(Step(0, 0, [], [Slice(i, at, texts[i][at : at + m], True) for i in group]), None)
            logits = stage.logits(out.rows, None).float()
            targets = torch.tensor([texts[i][at + 1 : at + m + 1] for i in group], device=logits.device)
            found = logits.log_softmax(-1).gather(1, targets.reshape(-1, 1)).view(len(group), m)
            scores[list(group), at : at + m] = found.cpu()
            choices[list(group), at : at + m] = logits.argmax(-1).view(len(group), m).cpu()
    return scores, choices


def compare(exact, found, counted):
    """Perplexities, relative difference with its standard error, and the share of equal choices, where ``counted``."""
    theirs, ours = (scores[counted].double() for scores, _ in (exact, found))
    change = theirs - ours
    return {
        "perplexity": math.exp(-float(ours.mean())),
        "float32_perplexity": math.exp(-float(theirs.mean())),
        "difference": math.expm1(float(change.mean())),
        "standard_error": float(change.std() / len(change) ** 0.5),
        "same_choice": float((found[1] == exact[1])[counted].double().mean()),
        "n_tokens": len(change),
    }


def measure(file, texts, counted, backend, paths, options=None, known=frozenset()):
    """Yield a row for each path and mode but those that are known."""
    paths = [replace(path, modes=tuple(m for m in path.modes if (path.name, m) not in known)) for path in paths]
    if not any(path.modes for path in paths):
        return
    spec = open_spec(file, options)
    stage = loaded(spec, EXACT, backend, len(texts), len(texts[0]))
    exact = read(stage, texts, MODES["chunks of 512"])
    for path in (path for path in paths if path.modes):
        stage = loaded(spec, path, backend, len(texts), len(texts[0]))
        for mode in path.modes:
            n, began = ONE_ROW_TEXTS if mode == "1 row" else len(texts), time.perf_counter()
            found = compare([x[:n] for x in exact], read(stage, texts[:n], MODES[mode]), counted[:n])
            print(
                f"{path.name:30} {mode:13} {found['perplexity']:9.4f} of {found['float32_perplexity']:9.4f} "
                f"{found['difference']:+8.3%} +- {found['standard_error']:.3%}  same choice {found['same_choice']:7.2%}"
                f" of {found['n_tokens']:,} tokens ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )
            yield {"model": Path(file).name, "path": path.name, "mode": mode, **found}


def held_out(n_texts, n_tokens):
    """Token ids of the texts, and which next tokens count."""
    with lzma.open(HELD_OUT) as file:
        rows = np.frombuffer(file.read(), "<i2").reshape(-1, ROW_TOKENS)[:n_texts, :n_tokens]
    return (rows & 0x7FFF).astype(int).tolist(), torch.from_numpy(rows[:, 1:] < 0)


def pieces(model, file, n_texts, n_tokens):
    """The first pieces of a text file as a model's token ids, of which all count."""
    tokenizer = Tokenizer.from_gguf(open_spec(model).files.metadata)
    start = tokenizer.encode_prompt("")  # what begins every prompt
    ids, n = tokenizer.encode(file.read_text()), n_tokens - len(start)
    texts = [start + ids[i * n : i * n + n] for i in range(n_texts)]
    if len(texts[-1]) < n_tokens:
        raise SystemExit(f"{file} has {len(ids)} tokens: ask for fewer than {n_texts} texts of {n_tokens}")
    return texts, torch.ones(n_texts, n_tokens - 1, dtype=torch.bool)


def golden(directory, backend, paths):
    """Yield rows of models with random weights: their perplexity is about their vocabulary, whatever they compute."""
    for folder in sorted(directory.iterdir()):
        if not (folder / "golden.npz").exists():
            continue
        with np.load(folder / "golden.npz") as z:
            if not {"input_ids", "logits"} <= set(z.files):
                continue  # a drafter
            ids = z["input_ids"].tolist()
        print(folder.name)
        counted = torch.ones(1, len(ids) - 1, dtype=torch.bool)
        few = [replace(path, modes=("chunks of 512", "1 row")) for path in paths]
        for row in measure(folder / "model.gguf", [ids], counted, backend, few, {"yarn_attn_factor": "file"}):
            yield {**row, "model": folder.name}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=ROW_TOKENS)
    parser.add_argument("--text", type=Path, help="a text file to read instead of the demo's texts")
    parser.add_argument("--golden", type=Path, help="such as tests/data/golden")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write bench/results/perplexity-DEVICE.json")
    parser.add_argument("--resume", action="store_true", help="leave out the rows that the file has")
    options = parser.parse_args()
    backend = Backend(options.device)
    prepare(backend, 0)
    name = torch.cuda.get_device_name(0) if backend is Backend.CUDA else platform.processor() or platform.machine()
    paths = CPU_PATHS if backend is Backend.CPU else CUDA_PATHS
    print(f"{name}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}")
    record = {"device": name, "torch": str(torch.__version__), "date": datetime.now(UTC).date().isoformat(), "rows": []}
    out = Path(__file__).parent / f"results/perplexity-{options.device}.json" if options.save else options.json
    if options.resume and out is not None and out.exists():
        record = json.loads(out.read_text())
    own = [row for row in record["rows"] if row["model"] == options.model.name]
    worst = max((row["difference"] for row in own), key=abs, default=0.0)
    known = {(row["path"], row["mode"]) for row in own}
    if options.text is not None:
        texts, counted = pieces(options.model, options.text, options.texts, options.tokens)
    else:
        texts, counted = held_out(options.texts, options.tokens)
    if not counted.any():
        raise SystemExit("the assistant says nothing in these tokens: ask for more")
    for row in measure(options.model, texts, counted, backend, paths, known=known):
        worst = max(worst, row["difference"], key=abs)
        keep(record, row, out)
    if options.golden is not None:
        for row in golden(options.golden, backend, paths):
            keep(record, row, out)
    met = abs(worst) < AIM
    print(f"largest difference {worst:+.4%}, aim {AIM:.1%}: {'met' if met else 'missed'}")
    raise SystemExit(0 if met else 1)


def keep(record, row, out):
    """Write what was measured so far: a run that is cut short has its rows."""
    record["rows"].append(row)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
