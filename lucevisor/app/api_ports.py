"""What the API knows of the configuration and the model.  The supervisor (run.py) adds what changes while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import structlog

from lucevisor.api.app_context import ApiSettings, AppContext, ModelCard, NotReadyPart, SamplingDefaults
from lucevisor.api.keys import ApiKeys
from lucevisor.api.preprocessing import Preprocessor
from lucevisor.app import logs
from lucevisor.app.model_cards import FamilyCard, find_card
from lucevisor.app.open_files import connections_within, raise_limit
from lucevisor.app.reload import keys_of
from lucevisor.config import Config
from lucevisor.deployment.served_model import ServedModel
from lucevisor.text.template import TEMPLATE_KEY, ChatTemplate
from lucevisor.text.tokenizer import Tokenizer

log = structlog.get_logger("lucevisor")


def make_app_context(
    config: Config, model: ServedModel, tokenizer: Tokenizer, not_ready: Callable[[], Sequence[NotReadyPart]]
) -> AppContext:
    """Return the ports of a server that has no engine yet; raises the limit of open files for its connections."""
    metadata = model.metadata
    client_keys, admin_keys = keys_of(config.server)
    card = find_card(model.spec.architecture, metadata) or FamilyCard(architectures=[], name="")
    direct = card.sampling_without_thinking
    return AppContext(
        model=_model_card(model, metadata),
        tokenizer=tokenizer,
        template=ChatTemplate.from_gguf(metadata),
        not_ready=not_ready,
        preprocessor=Preprocessor(metadata),
        defaults=SamplingDefaults.from_gguf(metadata, card.sampling.defaults()),
        direct_defaults=None if direct is None else direct.defaults(),
        efforts=dict(card.thinking_budgets.items()),
        stop_ids=card.stop_ids(tokenizer),
        keys=ApiKeys(client_keys),
        admin_keys=ApiKeys(admin_keys),
        settings=_settings(config),
        log_drops=logs.dropped,
        banned=tuple(range(tokenizer.n_vocab, model.spec.vocabulary)),
    )


def _model_card(model: ServedModel, metadata: Mapping[str, object]) -> ModelCard:
    return ModelCard(
        name=model.name,
        created_s=int(model.files[0].stat().st_mtime),
        size_bytes=sum(file.stat().st_size for file in model.files),
        path=str(model.files[0]),
        architecture=model.spec.architecture,
        quant=model.spec.quant,
        n_parameters=0 if model.spec.files is None else sum(prod(t.shape) for t in model.spec.files.tensors.values()),
        facts={key: value for key, value in metadata.items() if not isinstance(value, list) and key != TEMPLATE_KEY},
    )


def _settings(config: Config) -> ApiSettings:
    server = config.server
    most_connections = connections_within(raise_limit(), len(config.groups))
    if most_connections < server.max_connections:
        log.warning("fewer connections", max_connections=most_connections,
                    reason="the limit of open files is low: raise it (`ulimit -Hn`, LimitNOFILE=)")  # fmt: skip
    return ApiSettings(
        host=server.host,
        allow_open=server.allow_open,
        cors_origins=server.cors_origins,
        normalise=config.cache.normalise,
        max_connections=min(server.max_connections, most_connections),
    )
