"""Configuration: a TOML file and overrides as one typed, validated, frozen `Config`.

`schema` lists every key once, `strict` and `values` parse single values, `resolve` checks keys against each other,
`effects` knows which keys have no effect, `load` ties them together, `docs` generates docs/configuration.md.
"""

from lucevisor.config.api_keys import ApiKey, read_api_keys
from lucevisor.config.changes import changed_keys, merge_overrides
from lucevisor.config.draft import DraftConfig
from lucevisor.config.effects import not_yet_effective
from lucevisor.config.kvflash import KvFlashConfig
from lucevisor.config.load import load, values_in_file
from lucevisor.config.log import LogConfig
from lucevisor.config.pflash import PFlashConfig
from lucevisor.config.schema import Config
from lucevisor.config.sections import (
    USUAL_CHUNK,
    Backend,
    CacheConfig,
    DType,
    EngineConfig,
    GroupConfig,
    KvDType,
    ModelConfig,
    PlacementConfig,
    RecoveryConfig,
)
from lucevisor.config.server import ServerConfig
from lucevisor.config.tls import server_context
from lucevisor.config.values import (
    Auto,
    DeviceRef,
    HubFile,
    Notice,
    Ranges,
    RestartLimit,
    Split,
    WeightedSplit,
    is_loopback,
)

__all__ = [
    "USUAL_CHUNK",
    "ApiKey",
    "Auto",
    "Backend",
    "CacheConfig",
    "Config",
    "DType",
    "DeviceRef",
    "DraftConfig",
    "EngineConfig",
    "GroupConfig",
    "HubFile",
    "KvDType",
    "KvFlashConfig",
    "LogConfig",
    "ModelConfig",
    "Notice",
    "PFlashConfig",
    "PlacementConfig",
    "Ranges",
    "RecoveryConfig",
    "RestartLimit",
    "ServerConfig",
    "Split",
    "WeightedSplit",
    "changed_keys",
    "is_loopback",
    "load",
    "merge_overrides",
    "not_yet_effective",
    "read_api_keys",
    "server_context",
    "values_in_file",
]
