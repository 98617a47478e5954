"""Draft models: a whole small model that reads the target's tokens and drafts one token after the other."""

from __future__ import annotations

from torch import Tensor

from daemons.draft.drafter import Drafter, Drafts, VocabularyWeights, joined
from daemons.kv.batch import Batch
from daemons.kv.pools import Pools
from daemons.models import FAMILIES
from daemons.models.blocks import Output, PreNormLayer, advance_state
from daemons.models.loader import WeightLoader
from lucevisor.model.drafters.draft_model import DraftModelParams
from lucevisor.model.drafters.spec import EMBEDDING, DraftSpec


class DraftModel(Drafter):
    """A draft model.  Its context is the tokens alone: it reads no hidden states of the target."""

    attends_to_context = True

    def __init__(self, spec: DraftSpec, weights: WeightLoader, pools: Pools) -> None:
        params = spec.model.params
        assert isinstance(params, DraftModelParams)
        self.family = FAMILIES[params.family.architecture](params.family, weights, pools)
        self.embedding = self.family.embedding()
        self.layers = [self.family.layer(i) for i in range(spec.model.n_layers)]
        output = self.family.output()
        assert isinstance(output, Output)
        self.output, self.last_id = output, spec.model.vocabulary - 1
        vocabulary = VocabularyWeights(weights.tables[EMBEDDING], output.lm_head)
        super().__init__(vocabulary, weights.selector.operations)

    def extend(self, captures: Tensor | None, batch: Batch) -> Tensor:
        h = self.hidden(batch, len(self.layers) - 1)
        advance_state(self.layers[-1], h, batch)
        return h

    def hidden(self, batch: Batch, n_layers: int) -> Tensor:
        """The residual stream [T, E] after the first layers."""
        h = self.family.from_boundary(self.embedding(batch), batch)
        delta: Tensor | None = None
        for layer in self.layers[:n_layers]:
            if isinstance(layer, PreNormLayer):
                h, delta = layer.advance(h, delta, batch)
            else:
                h = layer(h, batch)
        return h if delta is None else self.operations.add(h, delta)

    def logits(self, h: Tensor) -> Tensor:
        """Logits [B, V] of rows of the residual stream, float32 where they are capped."""
        return self.output(h) if self.output.softcap else self.vocabulary.logits(self.output.norm(h))

    def draft_tokens(self, newest: int, n: int) -> list[int]:
        return super().draft_tokens(min(newest, self.last_id), n)

    def draft(self, hidden: Tensor | None, batch: Batch) -> Drafts:
        rows = batch.by_token(self.operations)
        ids, found = rows[0].ids, []
        for row in rows:
            row.ids = ids
            found.append(self.most_likely(self.logits(self.hidden(row, len(self.layers)))))
            ids = found[-1].tokens
        return joined(found, self.operations)
