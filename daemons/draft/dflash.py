"""DFlash drafters: a block of masks is filled in one pass, over a context of features captured from the target.

Version 2 adds convolutions along the block and a walk over candidates.  Maths: docs/speculation.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.draft.drafter import Drafter, Drafts, VocabularyWeights
from daemons.kv.batch import Batch
from daemons.kv.pools import Pools
from daemons.models.blocks import Attention, AttentionShape, Block, PreNormLayer
from daemons.models.llama import LlamaFamily
from daemons.models.loader import WeightLoader
from daemons.ops.linear import Linear, Table
from daemons.ops.operations import Operations
from daemons.ops.topk import Candidates
from lucevisor.model.drafters.dflash import DflashParams
from lucevisor.model.drafters.spec import DraftSpec
from lucevisor.model.spec import ModelSpec


class DflashFamily(LlamaFamily):
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

    def __init__(
        self,
        predecessor: Table,
        successor: Table,
        project: Linear,
        top_k: int,
        vocabulary: VocabularyWeights,
        operations: Operations,
    ) -> None:
        self.predecessor, self.successor, self.project = predecessor, successor, project
        self.top_k, self.vocabulary, self.operations = top_k, vocabulary, operations

    def candidates(self, hidden: Tensor, logits: Tensor, newest: Tensor) -> Candidates:
        """The candidates by ``hidden`` [B, n, E] and float32 ``logits`` [B, n, N] of the masks, behind ``newest``
        [B].
        """
        best, rows = self.operations.top_k(logits, self.top_k)
        tokens = self.vocabulary.tokens_of(rows)
        before, after = (table(tokens.view(-1)).view(*tokens.shape, -1) for table in (self.predecessor, self.successor))
        gate = self.project(hidden.flatten(0, 1)).view(*tokens.shape[:2], -1)
        return Candidates(best, tokens, self.predecessor(newest), before, after, gate)

    def __call__(self, hidden: Tensor, logits: Tensor, newest: Tensor) -> Drafts:
        return Drafts(*self.operations.select_path(self.candidates(hidden, logits, newest)))


class Dflash(Drafter):
    """A DFlash drafter, version 1 or 2."""

    def __init__(self, spec: DraftSpec, vocabulary: VocabularyWeights, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(vocabulary, weights.selector.operations)
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
                vocabulary,
                self.operations,
            )

    def extend(self, captures: Tensor | None, batch: Batch) -> Tensor:
        assert captures is not None
        features = self.feature_norm(self.fc(captures))
        for attention in self.attentions:
            attention.write(features, batch)
        return features

    def draft_tokens(self, newest: int, n: int) -> list[int]:
        return [newest] + [self.params.mask_token] * n

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states of the masks, [B, n, E], after the output norm."""
        h = self.vocabulary.table(batch.ids)
        if self.params.embedding_scale != 1.0:
            h = h * self.params.embedding_scale
        for layer in self.layers:
            h = layer(h, batch)
        n_slices, width = batch.groups[0].n_slices, h.shape[-1]
        masks = self.norm(h).view(n_slices, -1)[:, width:]
        return self.operations.concatenate([masks]).view(n_slices, -1, width)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, n, N] of hidden states [B, n, E] and rows of the output matrix, float32 where they are scaled."""
        p, logits = self.params, self.vocabulary.logits(hidden.flatten(0, 1))
        if p.logit_scale != 1.0 or p.softcap:
            logits = self.operations.cast(logits, torch.float32)
        if p.logit_scale != 1.0:
            logits = logits * p.logit_scale
        if p.softcap:
            logits = torch.tanh(logits / p.softcap) * p.softcap
        return logits.view(*hidden.shape[:2], -1)

    def draft(self, hidden: Tensor | None, batch: Batch) -> Drafts:
        masks = self.hidden(batch)
        logits = self.logits(masks)
        if self.selector is None:
            return self.most_likely(logits)
        newest = batch.ids.view(len(masks), -1)[:, 0]
        return self.selector(masks, logits, newest)
