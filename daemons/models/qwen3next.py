"""Family ``qwen3next``: ``qwen35moe`` with other input matrices of the gated delta net.  Maths: docs/families.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from daemons.models.blocks import GatedDeltaNetShape, GatedDeltaNetWeights
from daemons.models.loader import Rows
from daemons.models.qwen35moe import Qwen35MoeFamily


class Qwen3NextFamily(Qwen35MoeFamily):
    """Builds the blocks of one shard.

    A file's value heads are numbered key head by key head; blocks take the first one of every key head, then the second
    one of every key head, and so on.
    """

    def delta_shape(self) -> GatedDeltaNetShape:
        return replace(super().delta_shape(), grouped=True)

    def delta_weights(self, b: str) -> GatedDeltaNetWeights:
        n_key, n_value, d = self.p.delta_key_heads, self.p.delta_value_heads, self.p.delta_dim
        n = n_value // n_key  # value heads of a key head
        heads = [key * n + i for i in range(n) for key in range(n_key)]  # the file's, in the order of blocks
        alpha = rows(b + "ssm_ba.weight", ((2 * (j // n) + 1) * n + j % n for j in heads))
        beta = rows(b + "ssm_ba.weight", (2 * (j // n) * n + j % n for j in heads))
        conv = self.w.exact(b + "ssm_conv1d.weight")
        conv = conv.view(-1, d, conv.shape[1])
        channels = [*range(2 * n_key), *(2 * n_key + j for j in heads)]
        return GatedDeltaNetWeights(
            inputs=self.w.linear(*self.qkvz(b, heads), alpha, beta),
            output=self.w.linear(b + "ssm_out.weight"),
            conv_weight=conv[channels].flatten(0, 1).t().contiguous(),
            decay_rates=self.w.exact(b + "ssm_a")[heads],
            dt_bias=self.w.exact(b + "ssm_dt.bias")[heads],
            norm=self.norm(b + "ssm_norm.weight"),
        )

    def qkvz(self, b: str, heads: list[int]) -> list[Rows]:
        """The convolution's channels and the gates z of all ``heads``; ``ssm_in`` has q, k, v and z of a key head
        beside each other."""
        n_key, d = self.p.delta_key_heads, self.p.delta_dim
        merged, n = b + "ssm_in.weight", self.p.delta_value_heads // n_key
        if merged not in self.w.files.tensors:
            channels = [*range(2 * n_key), *(2 * n_key + j for j in heads)]
            return [rows(b + "attn_qkv.weight", channels, d), rows(b + "attn_gate.weight", heads, d)]
        size = 2 + 2 * n
        queries, keys = ([key * size + i for key in range(n_key)] for i in range(2))
        values, gates = ([j // n * size + 2 + i * n + j % n for j in heads] for i in range(2))
        return [rows(merged, [*queries, *keys, *values, *gates], d)]


def rows(name: str, heads: Iterable[int], d: int = 1) -> Rows:
    """Rows of heads of dim ``d``."""
    return Rows(name, tuple((j * d, j * d + d) for j in heads))
