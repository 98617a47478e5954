"""What bench/load.py measures, one process a measurement: prints one line of JSON.

    python bench/load_child.py make PATH KIND MEGABYTES     write a model of about that size
    python bench/load_child.py read PATH                    read the file, by the loader's chunks
    python bench/load_child.py load PATH BACKEND DTYPE      load the whole model as the one shard of a pipeline

``peak_bytes`` is the most that this process had resident at once while it read or loaded (VmHWM, set back to the
present value at the start), less what it had before; ``kept_bytes`` what stays: weights and pools in host memory.
The model's file is never mapped, so no page of it counts in either.  The libraries are: a small model is loaded before.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

EMBEDDING, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 8192, 16, 4, 128, 32768
CHUNK_BYTES = 8 << 20
CHILD = Path(__file__)


def shapes(n_layers, small):
    """Tensors of a qwen3 model; ``small``: of 256 x 256."""
    e, f, v = (256, 256, 256) if small else (EMBEDDING, FEED_FORWARD, VOCABULARY)
    h, k, d = (2, 1, 128) if small else (HEADS, KV_HEADS, HEAD_DIM)
    out = {"token_embd.weight": (v, e), "output_norm.weight": (e,), "output.weight": (v, e)}
    for i in range(n_layers):
        b = f"blk.{i}."
        out |= {b + "attn_norm.weight": (e,), b + "ffn_norm.weight": (e,)}
        out |= {b + "attn_q_norm.weight": (d,), b + "attn_k_norm.weight": (d,)}
        out |= {b + "attn_q.weight": (h * d, e), b + "attn_k.weight": (k * d, e), b + "attn_v.weight": (k * d, e)}
        out |= {b + "attn_output.weight": (e, h * d)}
        out |= {b + "ffn_gate.weight": (f, e), b + "ffn_up.weight": (f, e), b + "ffn_down.weight": (e, f)}
    return out


def make(path, kind, megabytes, small=False):
    """Random bytes for blocks; their scales are whatever comes, for nothing is computed with them."""
    import gguf

    quant = gguf.GGMLQuantizationType[kind]
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    layer = sum(np.prod(s) for n, s in shapes(1, small).items() if n.startswith("blk"))
    ends = sum(np.prod(s) for n, s in shapes(0, small).items())
    n_layers = 1 if small else max(1, round((megabytes * 1e6 / block_bytes * per_block - ends) / layer))
    tensors = shapes(n_layers, small)
    writer = gguf.GGUFWriter(path, "qwen3")
    e, f = tensors["blk.0.ffn_up.weight"][1], tensors["blk.0.ffn_up.weight"][0]
    heads = (2, 1) if small else (HEADS, KV_HEADS)
    numbers = {
        "block_count": n_layers, "context_length": 4096, "embedding_length": e, "feed_forward_length": f,
        "attention.head_count": heads[0], "attention.head_count_kv": heads[1], "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
    }  # fmt: skip
    for key, number in numbers.items():
        writer.add_uint32(f"qwen3.{key}", number)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    tile = np.random.default_rng(0).integers(0, 60, 64 << 20, dtype=np.uint8)  # small exponents, whatever the format
    rows = []
    for name, shape in tensors.items():
        if len(shape) == 1:
            rows.append(np.ones(shape, dtype=np.float32))
            writer.add_tensor_info(name, shape, rows[-1].dtype, rows[-1].nbytes)
            continue
        stored = (*shape[:-1], shape[-1] // per_block * block_bytes)
        n_bytes = int(np.prod(stored))
        rows.append(np.resize(tile[: min(n_bytes, len(tile))], n_bytes).reshape(stored) if small else n_bytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), n_bytes, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for row in rows:
        if isinstance(row, int):
            row = np.resize(tile, row) if row > len(tile) else tile[:row]
        writer.write_tensor_data(row)
    writer.close()
    return {"n_bytes": os.path.getsize(path), "n_layers": n_layers}


def resident(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


class Watch:
    """Seconds and peak of a block."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        self.before, self.began = resident("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self.began
        self.peak = resident("VmHWM") - self.before


def read(path):
    """The least a loader must do: every byte once into memory that is used again."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with Watch() as watch:
        at = 0
        while n := os.preadv(fd, [buffer], at):
            at += n
    os.close(fd)
    return {"seconds": watch.seconds, "n_bytes": at, "peak_bytes": watch.peak, "kept_bytes": 0}


def load(path, backend, dtype):
    import torch

    from daemons.models.stage import LoadedStage
    from lucevisor.model.families import open_spec
    from lucevisor.model.values import Backend, Dtype, LayerRange
    from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan

    def stage_of(path):
        spec = open_spec(path)
        plan = StagePlan(0, [ShardPlan(0, LayerRange(0, spec.n_layers))], None, None, embedding=True, output=True)
        order = Load([], Dtype(dtype), Dtype(dtype), [], [], PoolSizes(4, 0, 0), 4, 64)
        stage = LoadedStage.load(spec, plan, order, Backend(backend), lambda _: None)
        if backend != "cpu":
            torch.cuda.synchronize()
        return spec, stage

    with tempfile.TemporaryDirectory() as folder:
        kind = max((t.n_bytes, t.kind.name) for t in open_spec(path).files.tensors.values())[1]
        make(Path(folder) / "small.gguf", kind, 1, small=True)
        stage_of(Path(folder) / "small.gguf")
    with Watch() as watch:
        spec, stage = stage_of(path)
    (use,) = stage.usage()
    return {
        "seconds": watch.seconds,
        "n_bytes": spec.files.total_bytes,
        "peak_bytes": watch.peak,
        "kept_bytes": use.weight_bytes + use.state_bytes if backend == "cpu" else 0,
        "weight_bytes": use.weight_bytes,
        "largest_bytes": max(t.n_bytes for t in spec.files.tensors.values()),
        "device": str(torch.cuda.get_device_name() if backend != "cpu" else "cpu"),
        "torch": str(torch.__version__),
        "kernels": stage.kernels,
    }


def main():
    verb, path, *rest = sys.argv[1:]
    if verb == "make":
        out = make(Path(path), rest[0], float(rest[1]))
    elif verb == "read":
        out = read(path)
    else:
        out = load(Path(path), *rest)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
