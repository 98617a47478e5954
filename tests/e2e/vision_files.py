"""Models that see, of random weights: golden ones with tokens and a template for images, and their encoders."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, LlamaFileType

from bench.gguf_writing import finish, new_file
from tests.e2e.service import GOLDEN

NAMES = {
    "qwen35": {"<unk>": "<|image_pad|>", "<pad>": "<|vision_start|>", "<mask>": "<|vision_end|>"},
    "gemma4_moe": {"<|endoftext|>": "<|image|>", "<pad>": "<|image>", "<mask>": "<image|>"},
}
"""Tokens of the golden vocabularies, and what they are here."""
MARKS = {"qwen35": "<|vision_start|><|image_pad|><|vision_end|>", "gemma4_moe": "<|image|>"}
"""What templates write for an image."""
CONTROL = 3
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ 'MARK' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
E, F, HEADS, LAYERS, PATCH, MERGE, SIDE = 32, 48, 2, 2, 8, 2, 6
CELL = PATCH * MERGE


def write_model(path: Path, golden: str = "qwen35") -> Path:
    """A golden model under another vocabulary."""
    reader = GGUFReader(GOLDEN / golden / "model.gguf")
    names = NAMES[golden]
    writer = new_file(path, golden.removesuffix("_moe"), {})
    for key, found in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value, kind = found.contents(), found.types[0]
        if key == "tokenizer.ggml.tokens":
            renamed = [value.index(old) for old in names]
            value = [names.get(token, token) for token in value]
        elif key == "tokenizer.ggml.token_type":
            value = [CONTROL if i in renamed else kind_ for i, kind_ in enumerate(value)]
        sub_type = found.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=sub_type)
    writer.add_chat_template(TEMPLATE.replace("MARK", MARKS[golden]))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return path


def write_mmproj(path: Path, output: int = 64) -> Path:
    """An encoder of random weights, which loses no colour on the way."""
    rng, merged = np.random.default_rng(7), E * MERGE * MERGE
    writer = new_file(
        path, "clip",
        {
            "has_vision_encoder": True, "projector_type": "qwen3vl_merger", "use_gelu": True,
            "vision.projection_dim": output, "vision.image_size": SIDE * PATCH, "vision.patch_size": PATCH,
            "vision.embedding_length": E, "vision.feed_forward_length": F, "vision.block_count": LAYERS,
            "vision.attention.head_count": HEADS, "vision.attention.layer_norm_epsilon": 1e-6,
            "vision.spatial_merge_size": MERGE, "vision.image_min_pixels": 8 * CELL * CELL,
            "vision.image_max_pixels": 100 * CELL * CELL,
        },
    )  # fmt: skip
    writer.add_file_type(LlamaFileType.ALL_F32)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (E, 3, PATCH, PATCH), "v.patch_embd.weight.1": (E, 3, PATCH, PATCH),
        "v.patch_embd.bias": (E,), "v.position_embd.weight": (SIDE * SIDE, E), "v.post_ln.weight": (E,),
        "v.post_ln.bias": (E,), "mm.0.weight": (merged, merged), "mm.0.bias": (merged,),
        "mm.2.weight": (output, merged), "mm.2.bias": (output,),
    }  # fmt: skip
    for i in range(LAYERS):
        matrices = {"attn_qkv": (3 * E, E), "attn_out": (E, E), "ffn_up": (F, E), "ffn_down": (E, F)}
        for name, shape in matrices.items():
            shapes |= {f"v.blk.{i}.{name}.weight": shape, f"v.blk.{i}.{name}.bias": shape[:1]}
        for name in ("ln1", "ln2"):
            shapes |= {f"v.blk.{i}.{name}.weight": (E,), f"v.blk.{i}.{name}.bias": (E,)}
    for name, shape in shapes.items():
        norm = "ln" in name and name.endswith("weight")
        values = rng.normal(1.0 if norm else 0.0, 0.1 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5, shape)
        writer.add_tensor(name, values.astype(np.float32))
    finish(writer)
    return path


def write_gemma_mmproj(path: Path, output: int = 64) -> Path:
    """The same for Gemma 4."""
    rng = np.random.default_rng(7)
    writer = new_file(
        path, "clip",
        {
            "has_vision_encoder": True, "vision.projector_type": "gemma4v", "vision.projection_dim": output,
            "vision.image_size": SIDE * PATCH, "vision.patch_size": PATCH, "vision.embedding_length": E,
            "vision.feed_forward_length": F, "vision.block_count": LAYERS, "vision.attention.head_count": HEADS,
            "vision.attention.layer_norm_epsilon": 1e-6, "vision.projector.scale_factor": MERGE,
        },
    )  # fmt: skip
    writer.add_file_type(LlamaFileType.ALL_F32)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (E, 3, PATCH, PATCH), "v.position_embd.weight": (2, 256, E),
        "mm.input_projection.weight": (output, E),
    }  # fmt: skip
    for i in range(LAYERS):
        matrices = {"attn_out": (E, E), "ffn_gate": (F, E), "ffn_up": (F, E), "ffn_down": (E, F)}
        matrices |= {f"attn_{n}": (E, E) for n in "qkv"} | {f"attn_{n}_norm": (E // HEADS,) for n in "qk"}
        matrices |= dict.fromkeys(("ln1", "ln2", "attn_post_norm", "ffn_post_norm"), (E,))
        shapes |= {f"v.blk.{i}.{name}.weight": shape for name, shape in matrices.items()}
    for name, shape in shapes.items():
        norm = len(shape) == 1
        values = rng.normal(1.0 if norm else 0.0, 0.1 if norm else 1.5 / shape[-1] ** 0.5, shape)
        writer.add_tensor(name, values.astype(np.float32))
    finish(writer)
    return path


def png(seed: int, width: int = 70, height: int = 50) -> bytes:
    """A picture of random stripes, as a PNG file; made here, so that no library is asked for what it should read."""
    rng = random.Random(seed)
    columns = [bytes(rng.randrange(256) for _ in range(3)) for _ in range(width // 10 + 1)]
    line = b"\0" + b"".join(columns[x // 10] for x in range(width))
    rows = b"".join(line if y < height // 2 else b"\0" + line[:0:-1] for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
