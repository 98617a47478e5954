"""DFlash drafters: a block of masks is filled in one pass, over a context of features captured from the target.

Version 2 adds convolutions along the block and a walk over candidates.  Maths: docs/speculation.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.draft.drafter import Drafter, Drafts, VocabularyWeights, most_likely, top_k
from daemons.kv.batch import Batch
from daemons.kv.pools import Pools
from daemons.models.blocks import Attention, AttentionShape, Block, PreNormLayer
from daemons.models.loader import WeightLoader
from daemons.models.qwen3 import Qwen3Family
from daemons.ops.linear import Linear, Table
from daemons.ops.operations import Operations
from lucevisor.model.drafters.dflash import DflashParams
from lucevisor.model.drafters.spec import DraftSpec
from lucevisor.model.spec import ModelSpec


class DflashFamily(Qwen3Family):
    """Builds the layers: those of ``qwen3`` with a mask of their own and, in version 2, convolutions around blocks."""

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, DflashParams)
        self.params = spec.params
        self.attentions: list[Attention] = []

    def attention_shape(self, index: int) -> AttentionShape:
        p = self.params
        window, causal = p.windows[index], p.causal[index]
        return AttentionShape(p.n_heads, p.n_kv_heads, p.head_dim, p.head_dim**-0.5, window=window, causal=causal)

    def layer(self, index: int) -> Block:
        b = f"blk.{index}."
        attention = self.attention(index)
        self.attentions.append(attention)
        mixer, mlp = self._convolved(b + "attn", attention), self._convolved(b + "ffn", self.mlp(index))
        norms = self.norm(b + "attn_norm.weight"), self.norm(b + "ffn_norm.weight")
        return PreNormLayer(norms[0], mixer, norms[1], mlp, self.operations)

    def _convolved(self, prefix: str, block: Block) -> Block:
        if self.params.selector is None:
            return block
        base, project = self.w.exact(prefix + "_conv_base"), self.w.linear(prefix + "_conv_proj.weight")
        return ConvolvedBlock(block, base, project, self.operations)


class ConvolvedBlock:
    """``conv_1(block(conv_0(x)))`` along each slice, with kernels ``base`` [2, taps, E] float32 plus ``project x``."""

    def __init__(self, block: Block, base: Tensor, project: Linear, operations: Operations) -> None:
        self.block, self.base, self.project, self.operations = block, base, project, operations

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        [group] = batch.groups
        delta = self.project(x)
        x = self.operations.block_convolution(x, delta, self.base, 0, group.n_tokens)
        return self.operations.block_convolution(self.block(x, batch), delta, self.base, 1, group.n_tokens)


class CandidateSelector:
    """Rescores the ``top_k`` best tokens of each position with the token before, and walks along the best."""

    def __init__(self, predecessor: Table, successor: Table, project: Linear, top_k: int) -> None:
        self.predecessor, self.successor, self.project, self.top_k = predecessor, successor, project, top_k

    def candidates(self, hidden: Tensor, logits: Tensor, newest: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates [B, n, K] and scores [B, n, K, K]: of each candidate of the position before, then of its own.

        ``hidden`` [B, n, E] and float32 ``logits`` [B, n, V] of the masks, ``newest`` [B].
        """
        best, tokens = top_k(logits, self.top_k)
        before = torch.cat((newest[:, None, None].expand(-1, 1, self.top_k), tokens[:, :-1]), dim=1)
        gate = self.project(hidden.flatten(0, 1)).float().view(*tokens.shape[:2], 1, -1)
        pairs = self._rows(self.predecessor, before).mul(gate) @ self._rows(self.successor, tokens).mT
        return tokens, pairs + best.unsqueeze(2)

    @staticmethod
    def _rows(table: Table, tokens: Tensor) -> Tensor:
        return table(tokens.reshape(-1)).float().view(*tokens.shape, -1)

    def __call__(self, hidden: Tensor, logits: Tensor, newest: Tensor) -> Drafts:
        tokens, scores = self.candidates(hidden, logits, newest)
        best, following = scores.softmax(dim=-1).max(dim=-1)  # of every candidate of the position before
        at = newest.new_zeros(len(newest), 1)
        steps, picked = [], []
        for position in range(tokens.shape[1]):
            steps.append(at)
            at = following[:, position].gather(1, at)
            picked.append(at)
        before, path = torch.stack(steps, dim=1), torch.stack(picked, dim=1)
        return Drafts(tokens.gather(2, path).squeeze(-1), best.gather(2, before).squeeze(-1))


class Dflash(Drafter):
    """A DFlash drafter, version 1 or 2."""

    def __init__(self, spec: DraftSpec, vocabulary: VocabularyWeights, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(vocabulary)
        family = DflashFamily(spec.model, weights, pools)
        self.params = family.params
        self.fc, self.feature_norm = weights.linear("fc.weight"), family.norm("enc.output_norm.weight")
        self.layers = [family.layer(i) for i in range(spec.model.n_layers)]
        self.attentions, self.norm = family.attentions, family.norm("output_norm.weight")
        self.selector: CandidateSelector | None = None
        if self.params.selector is not None:
            self.selector = CandidateSelector(
                weights.table("selector_predecessor.weight"),
                weights.table("selector_successor.weight"),
                weights.linear("selector_hidden.weight"),
                self.params.selector.top_k,
            )

    def extend(self, captures: Tensor | None, batch: Batch) -> Tensor:
        assert captures is not None
        features = self.feature_norm(self.fc(captures))
        for attention in self.attentions:
            attention.write(features, batch)
        return features

    def draft_tokens(self, newest: int, n: int) -> list[int]:
        return [newest] + [self.params.mask_token] * n

    def first_visible(self, draft_from: int) -> int:
        return draft_from

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states of the masks, [B, n, E], after the output norm."""
        h = self.vocabulary.table(batch.ids)
        if self.params.embedding_scale != 1.0:
            h = h * self.params.embedding_scale
        for layer in self.layers:
            h = layer(h, batch)
        return self.norm(h).view(batch.groups[0].n_slices, -1, h.shape[-1])[:, 1:]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [B, n, V] of hidden states [B, n, E]."""
        p = self.params
        logits = self.vocabulary.lm_head(hidden.flatten(0, 1)).float()
        if p.logit_scale != 1.0:
            logits = logits * p.logit_scale
        if p.softcap:
            logits = torch.tanh(logits / p.softcap) * p.softcap
        return logits.view(*hidden.shape[:2], -1)

    def draft(self, hidden: Tensor | None, batch: Batch) -> Drafts:
        masks = self.hidden(batch)
        logits = self.logits(masks)
        if self.selector is None:
            return most_likely(logits)
        newest = batch.ids.view(len(masks), -1)[:, 0]
        return self.selector(masks, logits, newest)
