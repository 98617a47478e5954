"""The configurations of several models that share devices.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lucevisor.config import Config
from lucevisor.config.sections import Neighbour
from lucevisor.deployment.served_model import ServedModel


def model_configs(config: Config, models: Sequence[ServedModel]) -> list[Config]:
    """Return the configuration of each model, which says what it may use beside the others: shares of device memory,
    and equal parts of the journal.
    """
    each = config.each_model
    if len(each) == 1:
        return [*each]
    recovery = replace(config.recovery, journal=config.recovery.journal // len(each))
    neighbours = tuple(Neighbour(own, model.n_bytes) for own, model in zip(each, models, strict=True))
    return [replace(own, recovery=recovery, neighbours=neighbours) for own in each]
