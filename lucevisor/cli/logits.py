"""``lucevisor logits``: logits and hidden states of token ids, to compare placements."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import uvloop

from lucevisor.app import logs
from lucevisor.app.model_files import open_model
from lucevisor.cli.options import OutputFile, config_argument
from lucevisor.config import Config, load, single_model
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.service import Observer, Service
from lucevisor.engine.output_rows import max_rows_per_step
from lucevisor.errors import ConfigError, ExitCode


@click.command()
@config_argument
@click.option(
    "--ids",
    "ids_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="JSON list of token ids.",
)
@click.option(
    "--out",
    type=OutputFile(),
    required=True,
    help="File to write: logits [T,V], hidden [L+1,T,E].",
)
def logits(config: Path, overrides: tuple[str, ...], ids_file: Path, out: Path) -> int:
    """Run token ids through the pipeline of daemons; save float32 logits of every position and the residual stream
    after every layer (row 0: the embedding output)."""
    loaded = single_model(load(config, overrides), "logits")
    logs.configure(loaded.log.format, "warning")
    model = open_model(loaded)
    try:
        ids = msgspec.json.decode(ids_file.read_bytes(), type=list[int])
    except msgspec.MsgspecError as e:
        raise click.BadParameter(f"{ids_file}: not a JSON list of token ids: {e}", param_hint="--ids") from e
    wrong = [i for i in ids if not 0 <= i < model.spec.vocabulary]
    if not ids or wrong:
        why = f"ids {wrong[:5]} are not in 0..{model.spec.vocabulary - 1}" if ids else "no ids"
        raise click.BadParameter(f"{ids_file}: {why}", param_hint="--ids")
    with (
        tempfile.TemporaryDirectory(prefix="lucevisor-logits-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        result = runner.run(logits_of(loaded, model, Path(directory), ids, Observer()))
    with out.open("wb") as file:
        np.savez(file, logits=result.logits, hidden=result.hidden, input_ids=np.asarray(ids, dtype=np.int32))
    click.echo(f"{out}: logits {list(result.logits.shape)}, hidden {list(result.hidden.shape)}")
    return ExitCode.DONE


async def logits_of(config: Config, model: ServedModel, run_dir: Path, ids: list[int], observer: Observer) -> Any:
    """Start the daemons, run ``ids`` through the whole model, stop.  Returns an IdsOutput."""
    service = Service(config, [model], run_dir, observer)
    try:
        await service.start()
        if not await service.wait_ready(None) or service.only.engine is None or service.only.placement is None:
            raise ConfigError("CONFIG", str(config.file), service.reason() or "the model did not become ready")
        spec = model.spec
        rows = max_rows_per_step(spec.vocabulary, spec.hidden_size, spec.n_layers, hidden=True)
        rows = min(service.only.placement.prefill_chunk, rows)
        return await service.only.engine.run_ids(ids, want_hidden=True, rows_per_step=rows)
    finally:
        await service.stop(0.0)
