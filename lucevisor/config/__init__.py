"""Configuration: a TOML file and overrides to one typed, checked, frozen `Config`.

`schema` lists every key once, `strict` and `values` read single values, `resolve` checks keys against each other,
`effects` knows what has no effect, `load` joins them, `docs` prints docs/configuration.md.
"""

from lucevisor.config.effects import not_yet_effective
from lucevisor.config.load import load
from lucevisor.config.resolve import read_api_keys
from lucevisor.config.schema import Config
from lucevisor.config.sections import (
    Backend,
    CacheConfig,
    DraftConfig,
    DType,
    EngineConfig,
    GroupConfig,
    KvDType,
    KvFlashConfig,
    LogConfig,
    ModelConfig,
    PFlashConfig,
    PlacementConfig,
    RecoveryConfig,
    ServerConfig,
)
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
    "is_loopback",
    "load",
    "not_yet_effective",
    "read_api_keys",
]
