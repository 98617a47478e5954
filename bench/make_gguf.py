"""GGUF files of full-size shapes with random weights, for measuring speed and memory where no real file can be had.

    python bench/make_gguf.py --shape qwen3.6-27b --out 27b.gguf [--counting] [--stats]

Shapes are those of published models (model_shapes.py), types the Q4_K_M mix as llama.cpp deals it out.  Blocks are
random bits with small scales, so that activations stay finite; the texts that come out mean nothing.  A name with
"tiny-" in front is the same family with few layers and a small vocabulary; "-mtp" has the model's MTP head, "-dflash2"
is its drafter.  With --counting the model's next token is the last one plus 1, so drafts can be made that are right:
the embedding outweighs what the layers add to it, and row i + 1 of the output matrix is row i of the embedding.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf_writing import aligned, finish_with_hole, new_file, tensor_bytes
from model_shapes import SHAPES

KINDS = gguf.GGMLQuantizationType
POOL_BYTES = 48 << 20
PIECE_BYTES = 16 << 20
ENDS = ("token_embd.weight", "output.weight")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTING_SCALE = 3000
"""Factor of the embedding of a counting model: what 64 layers add to the residual stream is a few per cent of it."""


def kind_of(model, name, shape):
    """Type of a tensor in the Q4_K_M mix.  Rows that are no whole blocks of 256 take Q5_0 for Q4_K, Q8_0 for Q6_K.

    gpt-oss comes with MXFP4 experts, as it was trained, and Q8_0 matrices.
    """
    if len(shape) < 2 or "conv1d" in name or "ffn_gate_inp" in name or name.endswith((".bias", "_conv_base")):
        return KINDS.F32
    if model.architecture == "gpt-oss":
        return KINDS.MXFP4 if "_exps." in name else KINDS.Q8_0
    embedding = name == "token_embd.weight" and (model.counting or "output.weight" not in model.tensors)
    wide = name == "output.weight" or embedding
    if name.startswith("blk."):
        i, n = int(name.split(".")[1]), model.n_layers
        more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
        wide = more and any(part in name for part in ("attn_v.", "attn_qkv.", "ffn_down"))
    if shape[-1] % 256:
        return KINDS.Q8_0 if wide else KINDS.Q5_0
    return KINDS.Q6_K if wide else KINDS.Q4_K


def layout(model):
    """(name, shape, kind, offset behind the header, bytes) of every tensor, and the bytes of all."""
    rows, at = [], 0
    for name, shape in model.tensors.items():
        kind = kind_of(model, name, shape)
        n_bytes = tensor_bytes(shape, kind)
        rows.append((name, shape, kind, at, n_bytes))
        at += aligned(n_bytes)
    return rows, at


def stats(model):
    """Parameters, bytes, and bytes by type."""
    rows, total = layout(model)
    by = {}
    for _, _, kind, _, n_bytes in rows:
        by[kind.name] = by.get(kind.name, 0) + n_bytes
    n = sum(int(np.prod(shape, dtype=np.int64)) for _, shape, *_ in rows)
    return {"parameters": n, "weight_bytes": sum(by.values()), "data_bytes": total, "bytes_by_type": by}


def write(path, model, seed=1):
    """Write the file; returns its bytes."""
    rows, total = layout(model)
    header = write_header(path, model, rows)
    rng = np.random.default_rng(seed)
    pools = {kind: pool(kind, rng, total) for kind in {row[2] for row in rows} - {KINDS.F32}}
    fd = os.open(path, os.O_RDWR)
    try:
        jobs = []
        for name, shape, kind, at, n_bytes in rows:
            if kind == KINDS.F32:
                put(fd, vector(name, shape, rng).tobytes(), header + at)
                continue
            if model.counting and name == "output.weight":
                continue
            block_bytes, data, done = gguf.GGML_QUANT_SIZES[kind][1], pools[kind], 0
            if model.counting and name == "token_embd.weight":
                data = pool(kind, rng, total, COUNTING_SCALE)
            most = min(PIECE_BYTES, len(data)) // block_bytes * block_bytes
            while done < n_bytes:
                n = min(most, n_bytes - done)
                start = int(rng.integers(0, (len(data) - n) // block_bytes + 1)) * block_bytes
                jobs.append((data[start : start + n], header + at + done))
                done += n
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(lambda job: put(fd, *job), jobs))
        if model.counting:
            follow(fd, *({name: (header + at, n, shape) for name, shape, _, at, n in rows}[x] for x in ENDS))
        os.fsync(fd)
    finally:
        os.close(fd)
    return header + total


def follow(fd, embedding, output):
    """Make row i + 1 of the output matrix row i of the embedding; each is (offset, bytes, shape), of one type."""
    (source, n_bytes, shape), (target, *same) = embedding, output
    assert same == [n_bytes, shape]
    row = n_bytes // shape[0]
    put(fd, os.pread(fd, row, source + n_bytes - row), target)
    for at in range(0, n_bytes - row, PIECE_BYTES):
        put(fd, os.pread(fd, min(PIECE_BYTES, n_bytes - row - at), source + at), target + row + at)


def write_header(path, model, rows):
    """Write all but the data; returns where they begin."""
    writer = new_file(path, model.architecture, model.metadata)
    writer.add_name(model.name)
    writer.add_quantization_version(2)
    tokens = [*byte_characters(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    n_special, n_bytes = 3, len(tokens) - 3
    tokens += [f"[{i}]" for i in range(len(tokens), model.vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * n_bytes + [3] * n_special + [1] * (len(tokens) - n_bytes - n_special))
    writer.add_token_merges(["Ġ t", "Ġ a"])
    writer.add_eos_token_id(n_bytes + 2)
    writer.add_chat_template(CHAT_TEMPLATE)
    if model.architecture == "dflash":
        writer.add_mask_token_id(model.vocabulary - 1)
    return finish_with_hole(path, writer, [row[:3] for row in rows])


def byte_characters():
    """The 256 characters by which byte-level tokenizers write bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def pool(kind, rng, total, factor=1):
    """Random blocks of a type, with scales that keep the weights at a standard deviation of about 0.015 x factor."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    n = max(64, min(POOL_BYTES, total) // block_bytes)
    blocks = rng.integers(0, 256, size=(n, block_bytes), dtype=np.uint8)
    scales = {  # byte offset -> half-precision number
        KINDS.Q4_K: {0: 1.0e-4, 2: 7.5e-4},
        KINDS.Q6_K: {208: 1.1e-5},
        KINDS.Q8_0: {0: 2.0e-4},
        KINDS.Q5_0: {0: 1.6e-3},
    }
    if kind == KINDS.MXFP4:
        blocks[:, 0] = 119  # the exponent of 2**-8
        return memoryview(blocks.reshape(-1))
    for offset, value in scales[kind].items():
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(factor * value).tobytes(), np.uint8)
    return memoryview(blocks.reshape(-1))


def vector(name, shape, rng):
    """A float32 tensor with values as such tensors have."""
    x = rng.standard_normal(shape, dtype=np.float32)
    if name == "rope_freqs.weight":
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30).astype(np.float32)
    if "norm" in name or "scale" in name:
        return 1 + 0.05 * x
    if name.endswith("_conv_base"):  # tap 0, the current token, is near 1
        return 0.05 * x + (np.arange(shape[1]) == 0).astype(np.float32)[:, None]
    if name.endswith("ssm_a"):
        return -np.exp(x) - np.float32(0.05)
    return (0.3 if "conv1d" in name else 0.03) * x


def put(fd, data, at):
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--counting", action="store_true", help="the next token is the last one plus 1")
    parser.add_argument("--stats", action="store_true", help="print what it holds")
    options = parser.parse_args()
    model = replace(SHAPES[options.shape](), counting=options.counting)
    if options.stats:
        print(stats(model))
    if options.out:
        started = time.perf_counter()
        n = write(options.out, model)
        print(f"{options.out}: {n / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
