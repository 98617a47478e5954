"""The vision stage: a whole encoder on one device, which makes the embedding rows of images.

Images come one at a time.  Invariant: the rows of an image depend on its pixels alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from daemons.device import allocating, launching, memory_free, prepare, torch_device, torch_dtype
from daemons.errors import StateError
from daemons.heartbeat import progress_of
from daemons.vision.blocks import Weight
from daemons.vision.gemma4v import Gemma4Encoder
from daemons.vision.qwen3vl import Qwen3VlEncoder
from daemons.weights.numbers import read_numbers
from lucevisor.model.values import Backend, LayerRange
from lucevisor.model.vision import GEMMA4V, QWEN3VL, VisionSpec, is_exact, open_vision
from lucevisor.protocol.loading import DeviceUse, Load, VisionPlan
from lucevisor.protocol.messages import EncodeImage, Progress

ENCODERS: dict[str, Callable[[VisionSpec, Weight], Callable[[Tensor], Tensor]]] = {
    QWEN3VL: Qwen3VlEncoder,
    GEMMA4V: Gemma4Encoder,
}
_ADVICE = "name another device in vision.device, or lower vision.max_tokens"


class VisionStage:
    """A loaded encoder; see :meth:`load`."""

    def __init__(
        self, spec: VisionSpec, plan: VisionPlan, device: torch.device, dtype: torch.dtype, report: Callable[..., None]
    ) -> None:
        self.spec, self.plan, self.device, self.dtype = spec, plan, device, dtype
        self.weight_bytes, self._done = 0, 0
        self._report = report
        self._encoder = ENCODERS[spec.projector](spec, self._weight)

    @classmethod
    @torch.inference_mode()
    def load(cls, load: Load, backend: Backend, progress: Callable[[Progress], None]) -> VisionStage:
        """Load the encoder of ``load.vision`` and run it once.

        Raises GgufError, LoadError (file, tensor) or DeviceError (device, tensor, bytes).
        """
        plan = load.vision
        assert plan is not None
        prepare(backend, load.threads)
        spec = open_vision(Path(plan.files[0]))
        device, report = torch_device(backend, plan.device), progress_of(progress, -1, plan.device)
        stage = cls(spec, plan, device, torch_dtype(load.dtype), report)
        side = spec.cell_pixels * max(1, math.isqrt(min(plan.max_tokens, 64)))
        stage.encode(EncodeImage(0, side, side), memoryview(bytearray(3 * side * side)))
        return stage

    @torch.inference_mode()
    def encode(self, message: EncodeImage, pixels: memoryview) -> Tensor:
        """Return the float32 rows [tokens, output_size] of an image, on the host.  Raises StateError for a size that
        the encoder does not take."""
        width, height, cell = message.width, message.height, self.spec.cell_pixels
        where = f"image {message.image} of {width} x {height} pixels"
        if width < 1 or height < 1 or width % cell or height % cell:
            raise StateError(where, f"the encoder takes whole squares of {cell} x {cell} pixels")
        if (width // cell) * (height // cell) > self.plan.max_tokens:
            raise StateError(where, f"the encoder was loaded for images of up to {self.plan.max_tokens} tokens")
        if len(pixels) != 3 * width * height:
            raise StateError(where, f"{len(pixels)} bytes of pixels")
        image = torch.frombuffer(pixels, dtype=torch.uint8).view(height, width, 3)
        n_bytes = self.spec.workspace_bytes(self.plan.max_tokens, self.plan.dtype)
        with launching(self.device), allocating(self.device, where, n_bytes, _ADVICE):
            return self._encoder(image.to(self.device)).float().cpu()

    def usage(self) -> DeviceUse:
        """Memory of the encoder, measured."""
        layers, free = LayerRange(0, self.spec.n_layers), memory_free(self.device)
        return DeviceUse(self.plan.device, layers, self.weight_bytes, 0, free)

    def _weight(self, name: str) -> Tensor:
        """Read a tensor: vectors and learned positions in float32, matrices in the compute dtype."""
        spec, files = self.spec, self.spec.files
        tensor, shape = files.tensors[name], spec.tensors[name]
        dtype = torch.float32 if is_exact(name, shape) else self.dtype
        values = read_numbers(files, tensor, dtype).view(shape)
        with allocating(self.device, files.where(tensor), values.nbytes, _ADVICE):
            values = values.to(self.device)
        self.weight_bytes += values.nbytes
        self._done += tensor.n_bytes
        self._report(self._done, files.total_bytes)
        return values
