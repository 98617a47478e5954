"""MTP heads: one decoder layer that predicts a token more from the target's last hidden state, and then from its own.

Maths: docs/speculation.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from daemons.draft.drafter import Drafter, Drafts, VocabularyWeights, joined
from daemons.kv.batch import Batch, Group
from daemons.kv.pools import Pools
from daemons.models.blocks import PreNormLayer
from daemons.models.loader import WeightLoader
from daemons.models.qwen3next import Qwen3NextFamily
from daemons.models.qwen35 import Qwen35Family
from daemons.models.qwen35moe import Qwen35MoeFamily
from lucevisor.model.drafters.mtp import HIDDEN_LAYER, MtpParams
from lucevisor.model.drafters.spec import DraftSpec

FAMILIES = {"qwen35": Qwen35Family, "qwen35moe": Qwen35MoeFamily, "qwen3next": Qwen3NextFamily}


class Mtp(Drafter):
    """An MTP head.  Row p of its context is token p with the hidden state of the token before, kept per sequence."""

    starts_from_hidden = True

    def __init__(self, spec: DraftSpec, vocabulary: VocabularyWeights, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(vocabulary, weights.selector.operations)
        params = spec.model.params
        assert isinstance(params, MtpParams)
        family = FAMILIES[params.family](replace(spec.model, params=params.block), weights, pools)
        self.dtype = weights.selector.dtype
        self.target_norm, self.head_norm = (
            family.norm(name) for name in ("output_norm.weight", "nextn.shared_head_norm.weight")
        )
        self.embedding_norm, self.hidden_norm = (family.norm(f"nextn.{name}.weight") for name in ("enorm", "hnorm"))
        self.project = weights.linear("nextn.eh_proj.weight")
        self.attention_norm, self.attention = family.norm("blk.0.attn_norm.weight"), family.attention(0)
        mlp_norm = family.norm("blk.0.post_attention_norm.weight")
        self.layer = PreNormLayer(self.attention_norm, self.attention, mlp_norm, family.mlp(0), family.operations)
        self.states = pools.state(HIDDEN_LAYER, "hidden")

    def extend(self, captures: Tensor | None, batch: Batch) -> Tensor:
        assert captures is not None
        hidden = self.target_norm.float32(captures)
        rows = self._inputs(batch.ids, batch.map_groups(self._shift, hidden))
        self.attention.write(self.attention_norm(rows), batch)
        return hidden

    def _shift(self, group: Group, hidden: Tensor) -> Tensor:
        """Hidden states [B, n, E] of the tokens before; keeps the last ones."""
        if group.layout.state_columns:
            return self.operations.shift_rows(hidden, self.states, group.states, group.kept_states)
        shifted = torch.cat((group.load_state(self.states).unsqueeze(1), hidden[:, :-1]), dim=1)
        group.store_state(self.states, hidden[:, -1])
        return shifted

    def _inputs(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Input rows [T, E] of the layer from tokens and the float32 hidden states before them."""
        embedded = self.embedding_norm(self.vocabulary.table(ids))
        return self.project(self.operations.concatenate((embedded, self.hidden_norm.rounded(hidden, self.dtype))))

    def first_visible(self, draft_from: int) -> int:
        return draft_from + 1  # the hidden state before draft_from is unknown, and there is none before position 0

    def row(self, ids: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        """The head's hidden states [B, E] float32 after tokens and the hidden states before them."""
        return self.head_norm.float32(self.layer(self._inputs(ids, hidden), batch))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, N] of the rows of the output matrix."""
        return self.vocabulary.logits(self.operations.cast(hidden, self.dtype))

    def draft(self, hidden: Tensor | None, batch: Batch) -> Drafts:
        assert hidden is not None
        rows = batch.by_token(self.operations)
        ids, found = rows[0].ids, []
        for row in rows:
            hidden = self.row(ids, hidden, row)
            found.append(self.most_likely(self.logits(hidden)))
            ids = found[-1].tokens
        return joined(found, self.operations)
