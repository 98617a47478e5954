"""A DFlash 2 drafter trained together with the model, so that the layers it reads learn to tell what comes next.

Its loss is added to the model's own, by ``weight``: its gradient flows through the captured layers' outputs and the
embedding into the model.  The drafter has its own optimizer; its weights are where drafters/train.py --start goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

sys.path.append(str(Path(__file__).parent / "drafters"))

import dflash  # noqa: E402
from data import Batch  # noqa: E402
from losses import dflash_loss  # noqa: E402
from optimizer import Optimizer  # noqa: E402
from target import read_gguf  # noqa: E402


class LiveTarget:
    """What a drafter asks of its target, of a model in training."""

    def __init__(self, model: Qwen3_5ForCausalLM, mask_token: int) -> None:
        self.model, self.mask_token = model, mask_token
        self.width, self.eps = model.config.hidden_size, model.config.rms_norm_eps
        self.w = {"output_norm.weight": model.model.norm.weight.detach().float() + 1}

    @property
    def embedding(self) -> Tensor:
        return self.model.lm_head.weight

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding)


class Joint:
    def __init__(
        self, model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, shape: dflash.DFlashShape, weight: float,
        spacing: int, lr: float = 0.02, follow: bool = False,
    ) -> None:  # fmt: skip
        self.weight, self.spacing, self.follow = weight, spacing, follow
        self.device = model.device.type
        target = LiveTarget(model, tokenizer.convert_tokens_to_ids("<|mask|>"))
        self.drafter = dflash.DFlash(shape, target).to(model.device)
        self.optimizer = Optimizer(self.drafter, lr=lr, adam_lr=lr / 10, decay=0.05)
        self.features: list[Tensor] = []
        self.right = torch.zeros(shape.block, device=model.device)
        for i in shape.capture:
            model.model.layers[i].register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if layer.training:
            self.features.append(output[0] if isinstance(output, tuple) else output)

    def loss(self, ids: Tensor, counts: Tensor, hidden: Tensor, rows: int) -> Tensor:
        """The loss to add, of the first ``rows`` rows of the pass that gave ``hidden`` [B, T, E]; ids and counts [B, T]."""
        features = torch.cat([f[:rows] for f in self.features], -1)
        batch = Batch(ids[:rows], counts[:rows], hidden[:rows].detach(), features)
        self.features.clear()
        with torch.autocast(self.device, torch.bfloat16):
            loss, right = dflash_loss(self.drafter, batch, 0.5, 2.0, self.spacing, self.weight, self.follow)
        self.right.lerp_(right.detach().float(), 0.02)
        return loss

    def step(self, rate: float) -> None:
        self.optimizer.rate.fill_(rate)
        self.optimizer.step()

    def load(self, path: Path) -> None:
        weights = load_file(path) if path.suffix == ".safetensors" else read_gguf(path)[1]
        for name, tensor in self.drafter.tensors().items():
            tensor.data.copy_(weights[name].view(tensor.shape))

    def save(self, path: Path) -> None:
        save_file({name: t.detach().bfloat16().contiguous() for name, t in self.drafter.tensors().items()}, path)
