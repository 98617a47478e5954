"""Gemma 4 assistants: a chain of passes over one position, whose queries attend to the target's keys and values.

Those are made again from captures of the residual stream, with the target's matrices, and kept in pages of the
drafter's own.  Maths: docs/speculation.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from daemons.draft.drafter import Drafter, Drafts, VocabularyWeights, joined
from daemons.kv.batch import Batch
from daemons.kv.pools import Pools
from daemons.models.blocks import QkNormRope
from daemons.models.gemma4 import Gemma4Family
from daemons.models.loader import WeightLoader
from daemons.ops.basic import rope
from lucevisor.model.drafters.gemma4_assistant import (
    POST_PROJECTION,
    PRE_PROJECTION,
    TARGET_NORM,
    TARGET_ROPE_FREQS,
    AssistantParams,
    KeyValueSource,
)
from lucevisor.model.drafters.spec import DraftSpec
from lucevisor.model.values import KvGroup


class KeyValueWriter:
    """Keys and values of a layer of the target, from the residual stream [T, E] that goes into it."""

    def __init__(self, source: KeyValueSource, params: AssistantParams, weights: WeightLoader, pools: Pools) -> None:
        layer, b, operations = source.of_target, f"blk.{source.layer}.", weights.selector.operations
        self.at, self.shape = source.at, (-1, layer.n_kv_heads, layer.head_dim)
        self.key_values = layer.key_values
        names = [b + "attn_k.weight"] + ([] if layer.key_values else [b + "attn_v.weight"])
        self.project = weights.linear(*names)
        norm = weights.exact(b + "attn_norm.weight")
        self.norm = operations.norm(norm, norm.shape[-1], params.eps)
        key_norm = weights.exact(b + "attn_k_norm.weight").expand(layer.n_kv_heads, -1).contiguous()
        factors = None if layer.sliding else weights.exact(TARGET_ROPE_FREQS)
        rotary = rope(params.rotary[not layer.sliding], pools.device, factors)
        self.positions = QkNormRope(operations.norm(key_norm, layer.head_dim, params.eps), rotary, operations)
        self.value_norm = operations.norm(torch.ones(layer.head_dim, device=pools.device), layer.head_dim, params.eps)
        self.keys, self.values = pools.paged(source.layer, "k"), pools.paged(source.layer, "v")

    def __call__(self, h: Tensor, batch: Batch) -> None:
        found = self.project(self.norm(h.contiguous()))
        k, v = (found, found) if self.key_values else found.chunk(2, dim=-1)
        slots = batch.slots[KvGroup.FULL]
        self.keys.write(slots, self.positions(k.reshape(self.shape), batch))
        self.values.write(slots, self.value_norm(v.reshape(self.shape)))


class Gemma4Assistant(Drafter):
    """An assistant.  All drafts of a chain are at the position of the newest token, of which there are no keys yet: its
    batches begin one position before it, up to where they attend.
    """

    starts_from_hidden = True
    first_row = -1

    def __init__(self, spec: DraftSpec, vocabulary: VocabularyWeights, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(vocabulary, weights.selector.operations)
        params = spec.model.params
        assert isinstance(params, AssistantParams)
        self.scale, self.hidden_size = spec.model.embedding_scale, spec.model.hidden_size
        self.hidden_at = params.hidden_at
        family = Gemma4Family(replace(spec.model, params=params.block), weights, pools)
        self.dtype = weights.selector.dtype
        self.layers = [family.layer(i) for i in range(params.block.n_layers)]
        self.norm = family.norm("output_norm.weight")
        target_norm = weights.exact(TARGET_NORM)
        self.target_norm = weights.selector.operations.norm(target_norm, self.hidden_size, params.eps)
        self.writers = [KeyValueWriter(source, params, weights, pools) for source in params.sources]
        self.pre, self.post = weights.linear(PRE_PROJECTION), weights.linear(POST_PROJECTION)

    def extend(self, captures: Tensor | None, batch: Batch) -> Tensor:
        assert captures is not None
        streams = captures.view(captures.shape[0], -1, self.hidden_size).unbind(1)
        for writer in self.writers:
            writer(streams[writer.at], batch)
        return self.target_norm.float32(streams[self.hidden_at].contiguous())

    def row(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [B, V] after tokens and hidden states [B, E] of the target or of the draft before, and the
        hidden states for the next draft."""
        embedded = self.vocabulary.table(ids).to(self.dtype) * self.scale
        x = self.pre(torch.cat((embedded, hidden.to(self.dtype)), dim=-1))
        for layer in self.layers:
            x = layer(x, batch)
        out = self.norm(x)
        return self.vocabulary.logits(out), self.post(out)

    def draft(self, hidden: Tensor | None, batch: Batch) -> Drafts:
        assert hidden is not None
        rows = batch.by_token(self.operations)
        row = rows[0]
        row.positions = row.positions + 1
        ids, found = row.ids, []
        for _ in rows:
            logits, hidden = self.row(ids, hidden, row)
            found.append(Drafts(*self.operations.most_likely(logits)))
            ids = found[-1].tokens
        return joined(found, self.operations)
