"""`lucevisor logits` below the command line: daemons that run one list of token ids, and no endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lucevisor.config import Config
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import Observer, Service
from lucevisor.engine.rows import max_rows_per_step
from lucevisor.errors import ConfigError


async def logits_of(config: Config, model: ServedModel, run_dir: Path, ids: list[int], observer: Observer) -> Any:
    """Start the daemons, run ``ids`` through the whole model, stop.  Returns an IdsOutput."""
    service = Service(config, model, run_dir, observer)
    try:
        await service.start()
        if not await service.wait_ready(None) or service.engine is None or service.placement is None:
            raise ConfigError("CONFIG", str(config.file), service.reason() or "the model did not become ready")
        spec = model.spec
        rows = max_rows_per_step(spec.vocabulary, spec.hidden_size, spec.n_layers, hidden=True)
        rows = min(service.placement.prefill_chunk, rows)
        return await service.engine.run_ids(ids, want_hidden=True, rows_per_step=rows)
    finally:
        await service.stop(0.0)
