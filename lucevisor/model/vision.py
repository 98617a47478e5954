"""Vision encoders: the spec of an mmproj file (architecture ``clip``), and the sizes that its images are resized to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from lucevisor.model.gguf_files import NO_FILES, GgufFiles, open_model, part_paths
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import MAX_LAYERS, Keys, ModelSpec, Shapes, check_tensors, main_quant, model_name, tensor
from lucevisor.model.values import Dtype, dtype_bytes

ARCHITECTURE: Final = "clip"
QWEN3VL: Final = "qwen3vl_merger"
GEMMA4V: Final = "gemma4v"
IMAGE_ID: Final = 1 << 31
"""Ids of an image's tokens begin here, where no vocabulary reaches: 31 bits each of a hash of its content, so that two
images have the same ids where they are the same, and nowhere else."""


class Projector(NamedTuple):
    """The families that read what a projector makes, the token that chat templates write for an image, and those before
    and behind an image's own; "": the template writes them.  ``fills``: images are enlarged to as many tokens as they
    may have."""

    families: tuple[str, ...]
    placeholder: str
    before: str = ""
    behind: str = ""
    fills: bool = False


PROJECTORS: Final = {
    QWEN3VL: Projector(("qwen35", "qwen35moe"), "<|image_pad|>"),
    GEMMA4V: Projector(("gemma4",), "<|image|>", "<|image>", "<image|>", fills=True),
}


class ImageSize(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int


class ImageGrid(NamedTuple):
    """Rows and columns of an image's tokens."""

    height: int
    width: int

    @property
    def n_tokens(self) -> int:
        return self.height * self.width


class EncoderImage(NamedTuple):
    """An image as an encoder takes it: RGB pixels, a byte each, and the ids of its tokens."""

    size: ImageSize
    grid: ImageGrid
    pixels: bytes
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """An encoder: images of whole ``cell_pixels`` squares in, a row of ``output_size`` for each of them out.

    Patches are of ``patch`` pixels, ``merge`` x ``merge`` of them make a token.  ``side``: of the square of learned
    position embeddings.  ``min_tokens``, ``max_tokens``: of an image, by default.
    """

    projector: str
    name: str
    quant: str
    n_layers: int
    hidden_size: int
    feed_forward: int
    n_heads: int
    eps: float
    patch: int
    output_size: int
    merge: int = 1
    side: int = 0
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    min_tokens: int = 1
    max_tokens: int = 1
    tensors: Shapes = field(default_factory=dict)
    files: GgufFiles = field(default=NO_FILES, repr=False, compare=False)

    @property
    def cell_pixels(self) -> int:
        return self.patch * self.merge

    @property
    def of_projector(self) -> Projector:
        return PROJECTORS[self.projector]

    def grid(self, size: ImageSize) -> ImageGrid:
        return ImageGrid(size.height // self.cell_pixels, size.width // self.cell_pixels)

    def weight_bytes(self, dtype: Dtype) -> int:
        """Matrices are in ``dtype``, position embeddings and vectors in float32."""
        total = 0
        for name, shape in self.tensors.items():
            exact = is_exact(name, shape)
            total += math.prod(shape) * (4 if exact else dtype_bytes(dtype, 1))
        return total

    def workspace_bytes(self, max_tokens: int, dtype: Dtype) -> int:
        n_patches = max_tokens * self.merge * self.merge
        widest = max(3 * self.hidden_size, self.feed_forward, 3 * 2 * self.patch * self.patch)
        numbers = n_patches * (2 * widest + 8 * self.hidden_size)
        return numbers * max(4, dtype_bytes(dtype, 1))


def is_exact(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is kept in float32: vectors, and the table of positions."""
    return len(shape) == 1 or name == "v.position_embd.weight"


def filled(size: ImageSize, cell: int, max_tokens: int) -> ImageSize:
    """Return Gemma 4's size: the largest of whole cells, at most ``max_tokens``, in an image's aspect ratio.

    Raises ValueError where that has no cell.
    """
    width, height = size
    factor = math.sqrt(max_tokens * cell * cell / (width * height))
    rows, columns = (math.floor(factor * side / cell) for side in (height, width))
    if not rows and not columns:
        raise ValueError(f"is {width} x {height} pixels, and has no place among {max_tokens} tokens")
    if not rows:
        rows, columns = 1, min(width // height, max_tokens)
    elif not columns:
        rows, columns = min(height // width, max_tokens), 1
    return ImageSize(columns * cell, rows * cell)


def resized(size: ImageSize, cell: int, min_tokens: int, max_tokens: int) -> ImageSize:
    """Return Qwen's size (``smart_resize``): whole cells, ``min_tokens`` to ``max_tokens`` of them.

    Raises ValueError for an image that is too narrow.
    """
    width, height = size
    if max(width, height) > 200 * min(width, height):  # as the model's own processor has it
        raise ValueError(f"is {width} x {height} pixels: one side is more than 200 times the other")
    rows, columns = round(height / cell), round(width / cell)
    if rows * columns > max_tokens:
        scale = math.sqrt(height * width / (max_tokens * cell * cell))
        rows, columns = (max(1, math.floor(side / scale / cell)) for side in (height, width))
    elif rows * columns < min_tokens:
        scale = math.sqrt(min_tokens * cell * cell / (height * width))
        rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
    if rows * columns > max_tokens:  # one side is a single cell, and the other longer than all of them
        rows, columns = min(rows, max_tokens), min(columns, max_tokens)
    return ImageSize(columns * cell, rows * cell)


def read_vision_spec(files: GgufFiles, target: ModelSpec | None = None) -> VisionSpec:
    """Read the spec of an open mmproj file for ``target``.  Raises GgufError."""
    keys = Keys(files.metadata, ARCHITECTURE, str(files.paths[0]))
    architecture = files.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        reason = f"is {architecture!r}, and that of an mmproj file is {ARCHITECTURE!r}"
        raise GgufError(keys.file, "metadata value 'general.architecture'", reason)
    key = "vision.projector_type" if keys.has("vision.projector_type") else "projector_type"
    projector = keys.text(key, "")
    if projector not in PROJECTORS:
        raise keys.error(key, f"is {projector!r}; this version runs {', '.join(sorted(PROJECTORS))}")
    spec = (_read_qwen3vl if projector == QWEN3VL else _read_gemma4v)(_read_common(projector, files, keys), files, keys)
    check_tensors(files, spec.tensors)
    if target is not None:
        _check_target(spec, target, keys)
    return spec


def open_vision(path: Path, target: ModelSpec | None = None) -> VisionSpec:
    """Open an mmproj file and read its spec.  Raises GgufError, OSError."""
    return read_vision_spec(open_model(part_paths(path)), target)


def _check_target(spec: VisionSpec, target: ModelSpec, keys: Keys) -> None:
    of = spec.of_projector
    if target.architecture not in of.families:
        reads = " and ".join(of.families)
        raise keys.error("projector_type", f"is {spec.projector!r}, which {reads} read, not {target.architecture}")
    if spec.output_size != target.hidden_size:
        reason = f"is {spec.output_size}, and rows of {target.name} have {target.hidden_size} numbers: take the mmproj"
        raise keys.error("vision.projection_dim", f"{reason} file of this model")
    if spec.projector == QWEN3VL and not target.mrope:
        raise keys.error("projector_type", f"is {spec.projector!r}, and {target.name} has no rope.dimension_sections")
    tokens = target.files.metadata.get("tokenizer.ggml.tokens")
    for name in filter(None, (of.placeholder, of.before, of.behind)):
        if isinstance(tokens, list) and name not in tokens:
            raise keys.error("projector_type", f"is {spec.projector!r}, and {target.name} has no token {name}")


def _read_common(projector: str, files: GgufFiles, keys: Keys) -> VisionSpec:
    """What all mmproj files say; the rest is that of a projector that says nothing else."""
    return VisionSpec(
        projector=projector,
        name=model_name(files),
        quant=main_quant(files),
        n_layers=keys.integer("vision.block_count", high=MAX_LAYERS),
        hidden_size=keys.integer("vision.embedding_length"),
        feed_forward=keys.integer("vision.feed_forward_length"),
        n_heads=keys.integer("vision.attention.head_count"),
        eps=keys.number("vision.attention.layer_norm_epsilon", 1e-6, above=0.0),
        patch=keys.integer("vision.patch_size", high=256),
        output_size=keys.integer("vision.projection_dim"),
        files=files,
    )


def _check_heads(n_heads: int, width: int, keys: Keys) -> None:
    if width % n_heads or (width // n_heads) % 4:
        raise keys.error("vision.attention.head_count", f"{n_heads} heads do not divide {width} numbers into fours")


def _read_qwen3vl(spec: VisionSpec, files: GgufFiles, keys: Keys) -> VisionSpec:
    """Qwen3-VL, Qwen3.5 and Qwen3.6: pre-norm blocks with rotary positions, learned positions, a merger of squares."""
    e, f, patch, output = spec.hidden_size, spec.feed_forward, spec.patch, spec.output_size
    merge = keys.integer("vision.spatial_merge_size", 2, high=16)
    _check_heads(spec.n_heads, e, keys)
    if any(keys.flags("vision.is_deepstack_layers", spec.n_layers) or ()):
        raise keys.error("vision.is_deepstack_layers", "names layers whose features the model's layers add (Qwen3-VL)")
    side = keys.integer("vision.image_size", high=1 << 16) // patch
    merged = e * merge * merge
    tensors: Shapes = {
        "v.patch_embd.weight": (e, 3, patch, patch),
        "v.patch_embd.weight.1": (e, 3, patch, patch),
        "v.patch_embd.bias": (e,),
        "v.position_embd.weight": (side * side, e),
        "v.post_ln.weight": (e,),
        "v.post_ln.bias": (e,),
        "mm.0.weight": (merged, merged),
        "mm.0.bias": (merged,),
        "mm.2.weight": (output, merged),
        "mm.2.bias": (output,),
    }
    for i in range(spec.n_layers):
        b = f"v.blk.{i}."
        shapes = {"attn_qkv": (3 * e, e), "attn_out": (e, e), "ffn_up": (f, e), "ffn_down": (e, f)}
        for name, shape in shapes.items():
            tensors |= {f"{b}{name}.weight": shape, f"{b}{name}.bias": shape[:1]}
        for name in ("ln1", "ln2"):
            tensors |= {f"{b}{name}.weight": (e,), f"{b}{name}.bias": (e,)}
    cell = (patch * merge) ** 2
    return replace(
        spec,
        merge=merge,
        side=side,
        mean=_colours(keys, "vision.image_mean"),
        std=_colours(keys, "vision.image_std"),
        min_tokens=max(1, keys.integer("vision.image_min_pixels", 65536) // cell),
        max_tokens=max(1, keys.integer("vision.image_max_pixels", 4096 * cell) // cell),
        tensors=tensors,
    )


def _read_gemma4v(spec: VisionSpec, files: GgufFiles, keys: Keys) -> VisionSpec:
    """Gemma 4: norms before and after each block, rotary positions by column and row, squares of patches averaged."""
    e, f, heads, patch = spec.hidden_size, spec.feed_forward, spec.n_heads, spec.patch
    merge = keys.integer("vision.projector.scale_factor", 3, high=16)
    side = tensor(files, "v.position_embd.weight").shape[-2]
    width = tensor(files, "v.blk.0.attn_q.weight").shape[0] if spec.n_layers else heads
    _check_heads(heads, width, keys)
    tensors: Shapes = {
        "v.patch_embd.weight": (e, 3, patch, patch),
        "v.position_embd.weight": (2, side, e),
        "mm.input_projection.weight": (spec.output_size, e),
    }
    for i in range(spec.n_layers):
        b = f"v.blk.{i}."
        shapes: Shapes = {"attn_out": (e, width), "ffn_gate": (f, e), "ffn_up": (f, e), "ffn_down": (e, f)}
        for n in "qkv":
            shapes[f"attn_{n}"] = (width, e)
        for n in "qk":
            shapes[f"attn_{n}_norm"] = (width // heads,)
        for norm in ("ln1", "attn_post_norm", "ln2", "ffn_post_norm"):
            shapes[norm] = (e,)
        tensors |= {f"{b}{name}.weight": shape for name, shape in shapes.items()}
    for name in ("v.std_bias", "v.std_scale"):
        if name in files.tensors:
            tensors[name] = (e,)
    for name in [*tensors]:  # bounds of what goes in and out
        stem = name.removesuffix(".weight")
        bounds = [f"{stem}.{side_}_{end}" for side_ in ("input", "output") for end in ("min", "max")]
        tensors |= {bound: (1,) for bound in bounds if bound in files.tensors}
    return replace(spec, merge=merge, side=side, max_tokens=max(1, min(280, side // merge)), tensors=tensors)


def _colours(keys: Keys, key: str) -> tuple[float, float, float]:
    found = keys.raw(key)
    values: Sequence[object] = found if isinstance(found, list) else [0.5, 0.5, 0.5]
    if len(values) != 3 or not all(isinstance(value, float | int) for value in values):
        raise keys.error(key, f"is {found!r}, not a number for each of three colours")
    red, green, blue = (float(value) for value in values if isinstance(value, float | int))
    if key.endswith("std") and 0.0 in (red, green, blue):
        raise keys.error(key, "has a 0, and pixels are divided by it")
    return red, green, blue
