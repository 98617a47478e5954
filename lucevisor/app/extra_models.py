"""The models beside the served one in a running supervisor: who scores and encodes, and their parts of the status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from lucevisor.api.contexts import ApiSettings
from lucevisor.api.images import ImageReader
from lucevisor.compression.compressor import CompressionSettings, CompressionStatistics, Compressor
from lucevisor.compression.windows import WindowScorer
from lucevisor.config import Config
from lucevisor.deployment.extra_models import ScorerClient
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import ModelService
from lucevisor.engine.page_ranking import PageScorer
from lucevisor.errors import ScoringError, VisionError
from lucevisor.model.vision import EncoderImage
from lucevisor.placement.extra_models import image_tokens
from lucevisor.text.tokenizer import Tokenizer


class CurrentScorer:
    """The scorer of the deployment that serves; of several replicas, any that has one."""

    def __init__(self, services: Sequence[ModelService]) -> None:
        self._services = services

    @property
    def window_tokens(self) -> int:
        return self._scoring().placed.window_tokens

    async def score(self, tokens: Sequence[int], n_query: int) -> Sequence[float]:
        return await self._scoring().score(tokens, n_query)

    def _scoring(self) -> ScorerClient:
        placed = [service.deployment.scoring for service in self._services]
        scoring = [stage for stage in placed if stage is not None]
        if not scoring:
            raise ScoringError("the model is being placed")
        return next((stage for stage in scoring if stage.attached), scoring[0])


def make_compressor(services: Sequence[ModelService], tokenizer: Tokenizer) -> Compressor | None:
    """Return the compressor of a model, or its replicas; None while PFlash is off."""
    pflash, windows = services[0].config.pflash, _windows(services, tokenizer)
    if pflash.mode == "off" or windows is None:
        return None
    settings = CompressionSettings(
        threshold=pflash.threshold if pflash.mode == "auto" else 0, keep_ratio=pflash.keep_ratio, curve=pflash.curve
    )
    return Compressor(settings, windows)


def make_page_scorer(service: ModelService, tokenizer: Tokenizer) -> PageScorer | None:
    """Return what ranks pages under KV Flash's policy ``drafter``."""
    windows = _windows([service], tokenizer) if service.config.kvflash.policy == "drafter" else None
    return windows.page_scores if windows is not None else None


def _windows(services: Sequence[ModelService], tokenizer: Tokenizer) -> WindowScorer | None:
    model = services[0].model
    if model.scorer is None:
        return None
    return WindowScorer(tokenizer, CurrentScorer(services), model.scorer_tokenizer)


def pflash_status(service: ModelService, compressor: Compressor | None) -> dict[str, Any]:
    scoring = service.deployment.scoring
    now = compressor.statistics if compressor is not None else CompressionStatistics()
    use = None
    if scoring is not None and (loaded := service.deployment.loads.get(scoring.placed.group)) is not None:
        use = loaded.score
    return {
        "mode": service.config.pflash.mode,
        "state": "none" if scoring is None else "attached" if scoring.attached else "detached",
        "reason": scoring.unavailable_reason if scoring is not None else "",
        "name": scoring.placed.name if scoring is not None else "",
        "device": str(scoring.placed.device) if scoring is not None else "",
        "window_tokens": scoring.placed.window_tokens if scoring is not None else 0,
        "weight_bytes": use.weight_bytes if use is not None else 0,
        "state_bytes": use.state_bytes if use is not None else 0,
        "prompts": dict(now.outcomes),
        "tokens": now.n_tokens,
        "kept": now.n_kept,
        "windows": now.n_windows,
        "scored": now.n_scored,
        "remembered": compressor.n_remembered_parts if compressor is not None else 0,
        "reused": now.n_remembered,
        "seconds": round(now.seconds, 6),
    }


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
