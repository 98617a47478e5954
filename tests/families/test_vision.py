"""Vision encoders and the models that read what they make, of random shapes, against transformers run beside."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from daemons.kv.images import rope_positions
from daemons.vision.stage import VisionStage
from lucevisor.model.families import open_spec
from lucevisor.model.values import Backend, Dtype
from lucevisor.model.vision import IMAGE_ID, ImageSize, filled, open_vision, resized
from lucevisor.protocol.loading import Load, PoolSizes, VisionPlan
from lucevisor.protocol.messages import EncodeImage
from lucevisor.protocol.steps import ImageSpan
from tests.families.generate import vision
from tests.families.generate.made import Draw
from tests.families.pipeline import Pipeline, load_stages
from tests.numerics import RUNS, Bound, Exact

MADE = {"qwen35": vision.qwen35, "gemma4": vision.gemma4}
NEAR = 3e-5
"""Of the largest number: two float32 runs of a few layers."""
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def reference(made: vision.MadeVision, ids: list[int], rows: list[Tensor], grids: Tensor | None) -> Bound:
    """Exact logits [T, V] of a text with the rows of its images, and how far float32 may be from them."""

    def run(n: int) -> Tensor:
        types = torch.tensor([[int(i == made.image_id) for i in ids]] * n)
        of_qwen = {} if grids is None else {"image_grid_thw": grids.repeat(n, 1)}
        return made.model(
            torch.tensor([ids] * n),
            **of_qwen,
            mm_token_type_ids=types,
            mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=rows * n)},
            use_cache=False,
        ).logits

    with torch.no_grad(), Exact():
        [exact] = run(1)
    with torch.no_grad(), Exact(seed=0):
        return Bound.of(exact, run(RUNS))


def chunk_ends(n: int, size: int, whole: list[ImageSpan]) -> list[int]:
    """Ends of chunks of ``size`` tokens, none of which is inside of an image that must be ``whole``."""
    ends = [*range(size, n, size), n]
    return [end for end in ends if not any(image.start < end < image.stop for image in whole)]


def seeds(quick: int = 2, every: int = 12) -> list[object]:
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(f, s, id=f"{f}-{s}", marks=marks[s < quick]) for f in MADE for s in range(every)]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= NEAR * wanted.abs().max()


def load_encoder(path: Path, dtype: Dtype = Dtype.FLOAT32, max_tokens: int = 4096) -> VisionStage:
    plan = VisionPlan([str(path)], 0, max_tokens, dtype)
    load = Load([], dtype, dtype, [], [], PoolSizes(0, 0, 0), 1, 1, vision=plan)
    return VisionStage.load(load, Backend.CPU, lambda _: None)


def random_pixels(draw: Draw, cell: int) -> Tensor:
    rows, columns = draw.between(1, 5), draw.between(1, 5)
    return torch.from_numpy(draw.rng.integers(0, 256, (rows * cell, columns * cell, 3), dtype="uint8"))


def encode(stage: VisionStage, pixels: Tensor) -> Tensor:
    height, width, _ = pixels.shape
    return stage.encode(EncodeImage(1, width, height), memoryview(bytearray(pixels.numpy().tobytes())))


def processed(made: vision.MadeVision, images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers' own processor makes of images that have their size already."""
    pytest.importorskip("PIL", reason="transformers' processors need it")
    by_colour, v = [image.permute(2, 0, 1).numpy() for image in images], made.model.config.vision_config
    if made.text.architecture == "gemma4":
        return processed_by_gemma(by_colour, v.patch_size, v.pooling_kernel_size)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=v.patch_size, merge_size=v.spatial_merge_size, do_resize=False)
    found = [processor.normalize(processor.rescale(i, 1 / 255), [0.5] * 3, [0.5] * 3) for i in by_colour]
    parts = [processor.patchify(i, v.patch_size, v.spatial_merge_size, 2) for i in found]
    values = torch.cat([torch.from_numpy(part[0].copy()) for part in parts])
    return {"pixel_values": values.float(), "image_grid_thw": torch.tensor([[1, h, w] for _, h, w in parts])}


def processed_by_gemma(images: list[Any], patch: int, merge: int) -> dict[str, Tensor]:
    from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma

    values = [gemma.convert_image_to_patches(image / 255, patch) for image in images]
    places = [np.stack(np.meshgrid(*map(np.arange, (i.shape[2] // patch, i.shape[1] // patch))), -1) for i in images]
    n = max(map(len, values))
    parts = [gemma.pad_along_first_dim(v, p.reshape(-1, 2), n) for v, p in zip(values, places, strict=True)]
    found, at = (torch.from_numpy(np.stack(part)) for part in zip(*parts, strict=True))
    return {"pixel_values": found.float(), "image_position_ids": at}


@pytest.mark.parametrize(("family", "seed"), seeds())
def test_encoders_agree_with_transformers(family: str, seed: int, tmp_path: Path) -> None:
    draw = Draw(seed)
    made = MADE[family](draw)
    stage = load_encoder(made.write_mmproj(tmp_path / "mmproj.gguf"))
    images = [random_pixels(draw, stage.spec.cell_pixels) for _ in range(3)]
    with torch.no_grad():
        wanted = made.model.model.get_image_features(**processed(made, images), return_dict=True).pooler_output
    for pixels, rows in zip(images, wanted, strict=True):
        assert_near(encode(stage, pixels), rows)


@pytest.mark.parametrize(("family", "seed"), seeds())
def test_models_read_images_as_in_transformers(family: str, seed: int, tmp_path: Path) -> None:
    """Two images between texts, unsplit and over up to three stages, in chunks of any length."""
    draw = Draw(seed)
    made = MADE[family](draw)
    stage = load_encoder(made.write_mmproj(tmp_path / "mmproj.gguf"))
    spec = open_spec(made.text.write(tmp_path / "model.gguf"))
    open_vision(tmp_path / "mmproj.gguf", spec)
    images = [random_pixels(draw, stage.spec.cell_pixels) for _ in range(2)]
    rows = [encode(stage, pixels) for pixels in images]
    grids = [stage.spec.grid(ImageSize(i.shape[1], i.shape[0])) for i in images]
    ids, theirs, spans = list[int](), list[int](), list[ImageSpan]()
    for grid in [*grids, None]:
        text = [5 + i for i in draw.ids(draw.between(1, 9), made.text.vocabulary - 5)]
        ids, theirs = ids + text, theirs + text
        if grid is not None:
            spans.append(ImageSpan(len(ids), *grid))
            ids += [IMAGE_ID + i for i in draw.ids(grid.n_tokens, IMAGE_ID)]
            theirs += [made.image_id] * grid.n_tokens
    bound = reference(made, theirs, rows, processed(made, images).get("image_grid_thw"))
    boundaries = [b for b in range(1, spec.n_layers) if spec.legal_boundary(b)]
    for split in ([], boundaries[:1], boundaries[:: max(1, len(boundaries) - 1)][:2]):
        for size in (len(ids), draw.one(1, 3, 7)):
            pipeline = Pipeline(spec, load_stages(spec, split))
            pipeline.open(0, images=dict(zip(spans, rows, strict=True)))
            ends = [0, *chunk_ends(len(ids), size, spans if spec.whole_images else [])]
            worst = bound.worst(torch.cat([pipeline.run((0, ids[a:b])) for a, b in pairwise(ends)]))
            assert worst <= 1.0, f"split {split}, chunks of {size}: {worst:.2f} times what rounding explains"


def test_positions_go_on_behind_the_longer_side() -> None:
    images = (ImageSpan(2, 2, 3), ImageSpan(9, 1, 1))
    found = rope_positions(images, 0, 12)
    assert found.times == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8]
    assert found.rows == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]
    assert found.columns == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]
    for start in range(12):
        for stop in range(start + 1, 13):
            assert rope_positions(images, start, stop - start) == tuple(axis[start:stop] for axis in found)


def test_sizes_are_those_of_the_processor() -> None:
    pytest.importorskip("PIL", reason="transformers' processor needs it")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    draw = Draw(0)
    for _ in range(500):
        width, height = draw.between(1, 4000), draw.between(1, 4000)
        least, most = draw.between(1, 64), draw.between(64, 4096)
        cell = 32
        if max(width, height) > 200 * min(width, height):
            continue
        wanted = smart_resize(height, width, cell, least * cell * cell, most * cell * cell)
        assert resized(ImageSize(width, height), cell, least, most) == wanted[::-1]


def test_sizes_are_those_of_gemmas_processor() -> None:
    pytest.importorskip("PIL", reason="transformers' processor needs it")
    from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma

    draw = Draw(0)
    for _ in range(1000):
        width, height = draw.between(1, draw.one(20, 4000)), draw.between(1, draw.one(20, 4000))
        merge, patch, most = draw.between(1, 3), draw.one(8, 14, 16), draw.one(4, 70, 280, 1120)
        budget = most * merge * merge
        wanted = gemma.get_aspect_ratio_preserving_size(height, width, patch, budget, merge)
        assert filled(ImageSize(width, height), patch * merge, most) == wanted[::-1]
