"""Images in a running supervisor: how the API reads them, who encodes them, and their part of the status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from lucevisor.api.contexts import ApiSettings
from lucevisor.api.images import ImageReader
from lucevisor.config import Config
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import ModelService
from lucevisor.errors import VisionError
from lucevisor.model.vision import EncoderImage
from lucevisor.placement.extra_models import image_tokens


def make_image_reader(config: Config, model: ServedModel, settings: ApiSettings) -> ImageReader | None:
    if model.encoder is None:
        return None
    media_path = Path(config.vision.media_path) if config.vision.media_path else None
    limits = image_tokens(config, model.encoder, model.spec)
    return ImageReader.of(model.encoder, limits, media_path, settings.max_body_bytes)


def make_encoder(services: Sequence[ModelService]) -> Callable[[EncoderImage], Awaitable[memoryview]]:
    """Return what encodes images: the encoder of the deployment that serves, of replicas one with its daemon."""

    async def encode(image: EncoderImage) -> memoryview:
        placed = [service.deployment.vision for service in services]
        stages = [stage for stage in placed if stage is not None]
        if not stages:
            raise VisionError("images cannot be read yet: the model is being placed")
        return await next((stage for stage in stages if stage.attached), stages[0]).encode(image)

    return encode


def vision_status(service: ModelService) -> dict[str, Any]:
    stage = service.deployment.vision
    if stage is None:
        return {"state": "none"}
    loaded = service.deployment.loads.get(stage.placed.group)
    use = loaded.vision if loaded is not None else None
    return {
        "state": "attached" if stage.attached else "detached",
        "reason": stage.unavailable_reason,
        "name": stage.placed.name,
        "device": str(stage.placed.device),
        "min_tokens": stage.placed.min_tokens,
        "max_tokens": stage.placed.max_tokens,
        "weight_bytes": use.weight_bytes if use is not None else 0,
        "encoded": stage.n_encoded,
        "reused": stage.n_reused,
        "seconds": round(stage.seconds, 6),
    }
