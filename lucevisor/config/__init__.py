"""Configuration: a TOML file and overrides as one typed, validated, frozen `Config`.

`sections` lists every key once, `schema` and `formats` read single values, `checks` compares them with each other,
`load` ties them together.
"""

from lucevisor.config.credentials import ApiKey as ApiKey
from lucevisor.config.credentials import read_api_keys as read_api_keys
from lucevisor.config.credentials import read_credentials as read_credentials
from lucevisor.config.credentials import read_secret as read_secret
from lucevisor.config.credentials import server_context as server_context
from lucevisor.config.formats import Auto as Auto
from lucevisor.config.formats import DeviceRef as DeviceRef
from lucevisor.config.formats import HubFile as HubFile
from lucevisor.config.formats import Ranges as Ranges
from lucevisor.config.formats import RestartLimit as RestartLimit
from lucevisor.config.formats import Split as Split
from lucevisor.config.formats import WeightedSplit as WeightedSplit
from lucevisor.config.formats import is_loopback as is_loopback
from lucevisor.config.load import changed_keys as changed_keys
from lucevisor.config.load import load as load
from lucevisor.config.load import merge_overrides as merge_overrides
from lucevisor.config.load import renamed_errors as renamed_errors
from lucevisor.config.load import single_model as single_model
from lucevisor.config.load import values_in_file as values_in_file
from lucevisor.config.sections import USUAL_CHUNK as USUAL_CHUNK
from lucevisor.config.sections import Backend as Backend
from lucevisor.config.sections import CacheConfig as CacheConfig
from lucevisor.config.sections import ClusterConfig as ClusterConfig
from lucevisor.config.sections import Config as Config
from lucevisor.config.sections import DraftConfig as DraftConfig
from lucevisor.config.sections import DType as DType
from lucevisor.config.sections import EngineConfig as EngineConfig
from lucevisor.config.sections import GroupConfig as GroupConfig
from lucevisor.config.sections import KvDType as KvDType
from lucevisor.config.sections import KvFlashConfig as KvFlashConfig
from lucevisor.config.sections import LogConfig as LogConfig
from lucevisor.config.sections import LoraConfig as LoraConfig
from lucevisor.config.sections import ModelConfig as ModelConfig
from lucevisor.config.sections import Notice as Notice
from lucevisor.config.sections import PFlashConfig as PFlashConfig
from lucevisor.config.sections import PlacementConfig as PlacementConfig
from lucevisor.config.sections import RecoveryConfig as RecoveryConfig
from lucevisor.config.sections import ReplicaConfig as ReplicaConfig
from lucevisor.config.sections import ServerConfig as ServerConfig
