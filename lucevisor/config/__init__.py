"""Configuration: a TOML file and overrides as one typed, validated, frozen `Config`.

`sections` lists every key once, `schema` and `formats` read single values, `checks` compares them with each other,
`load` ties them together, `docs` generates docs/configuration.md.
"""

from lucevisor.config.credentials import ApiKey, read_api_keys, server_context
from lucevisor.config.formats import (
    Auto,
    DeviceRef,
    HubFile,
    Ranges,
    RestartLimit,
    Split,
    WeightedSplit,
    is_loopback,
)
from lucevisor.config.load import changed_keys, load, merge_overrides, values_in_file
from lucevisor.config.sections import (
    USUAL_CHUNK,
    Backend,
    CacheConfig,
    Config,
    DraftConfig,
    DType,
    EngineConfig,
    GroupConfig,
    KvDType,
    KvFlashConfig,
    LogConfig,
    ModelConfig,
    Notice,
    PFlashConfig,
    PlacementConfig,
    RecoveryConfig,
    ServerConfig,
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
    "read_api_keys",
    "server_context",
    "values_in_file",
]
