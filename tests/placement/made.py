"""Models, machines and configurations for planner tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lucevisor.config import Config, load
from lucevisor.errors import ConfigError, ExitCode
from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor
from lucevisor.model.values import Dtype, KvGroup
from lucevisor.placement.devices import Inventory
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Infeasible, Placement, PlacementError
from lucevisor.protocol.loading import DeviceInfo

DEMO = Path(__file__).parents[2] / "etc/demo/demo-qwen35-22m-q4_k_m.gguf"
GIB = 1 << 30
MIB = 1 << 20
BOX = ["cuda:0", "hip:0", "hip:1"]
BOX_SPLIT = [0.08, 0.46, 0.46]
CPUS = ["left:0", "right:0"]
BACKENDS = {"cuda": "cuda", "hip": "hip", "left": "cpu", "right": "cpu", "third": "cpu", "draft": "cpu"}
OFF: Mapping[str, object] = {"kind": "off"}


def gpu(index: int = 0, gib: float = 24, *, bfloat16: bool = True, name: str = "GPU") -> DeviceInfo:
    """A GPU with ``gib`` free."""
    dtypes = [Dtype.FLOAT32, Dtype.FLOAT16, *([Dtype.BFLOAT16] if bfloat16 else [])]
    return DeviceInfo(index, name, int(gib * GIB) + GIB, int(gib * GIB), "sm_86", dtypes)


def cpu(gib: float = 16, *, bfloat16: bool = True) -> DeviceInfo:
    """A host with ``gib`` available."""
    dtypes = [Dtype.FLOAT32, *([Dtype.BFLOAT16] if bfloat16 else [])]
    return DeviceInfo(0, "CPU", 2 * int(gib * GIB), int(gib * GIB), "x86_64", dtypes)


def configure(
    folder: Path, devices: Sequence[str], split: object = "auto", draft: Mapping[str, object] = OFF, **engine: object
) -> Config:
    """Write and load a configuration; groups are those of ``devices`` and of the drafter.  Nothing is set aside for
    prefix slots, and eight sequences run if not said otherwise."""
    on = [str(draft["device"])] if "device" in draft else []
    groups = dict.fromkeys(device.split(":")[0] for device in (*devices, *on))
    lines = ["[model]", 'path = "model.gguf"']
    for group in groups:
        lines += [f"[groups.{group}]", f'backend = "{BACKENDS[group]}"']
    lines += [
        "[placement]",
        f"target_devices = {json.dumps(list(devices))}",
        f"target_layer_split = {json.dumps(split)}",
    ]
    lines += [
        "[cache]",
        "prefix_slots = 0",
        "[draft]",
        *(f"{key} = {json.dumps(value)}" for key, value in draft.items()),
    ]
    engine = {"max_sequences": 8, **engine}
    lines += ["[engine]", *(f"{key} = {json.dumps(value)}" for key, value in engine.items())]
    path = folder / "plan.toml"
    path.write_text("\n".join(lines) + "\n")
    return load(path)


def bare_spec(n_layers: int = 12, sharing: dict[int, int] | None = None, window: int = 0) -> ModelSpec:
    """A model without files: attention layers only, ``sharing[i]`` the layer whose pages layer i reads.

    With a ``window``, even layers slide.  Its weights cannot be counted.
    """
    page = (StateTensor("k", (64, 2, 32)), StateTensor("v", (64, 2, 32)))
    layers = tuple(
        LayerSpec(
            index=i,
            kv_group=KvGroup.WINDOW if window and i % 2 == 0 else KvGroup.FULL,
            tensors={},
            state=() if sharing and i in sharing else page,
            window=window if i % 2 == 0 else 0,
            shares_with=sharing.get(i) if sharing else None,
        )
        for i in range(n_layers)
    )
    return ModelSpec("any", "bare", "F32", 64, 100, 4096, layers, {}, {}, 64, None)


def placed(spec: ModelSpec, config: Config, inventory: Inventory | None = None, **more: object) -> Placement:
    result = plan(spec, config, inventory, **more)  # type: ignore[arg-type]
    assert isinstance(result, Placement), result.message
    return result


def refused(spec: ModelSpec, config: Config, inventory: Inventory | None = None) -> Infeasible:
    result = plan(spec, config, inventory)
    assert isinstance(result, Infeasible)
    return result


def box(first: float = 23, second: float = 94, third: float = 31) -> Inventory:
    return {"cuda": [gpu(0, first)], "hip": [gpu(0, second), gpu(1, third)]}


def wrong(spec: ModelSpec, config: Config, inventory: Inventory | None = None) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        plan(spec, config, inventory)
    error = caught.value
    assert isinstance(error, ConfigError)
    assert error.exit_code is ExitCode.USAGE
    assert error.file == str(config.file)
    return error
