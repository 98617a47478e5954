"""Random models of ``bert``, and the tensors of any."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families.generate.made import Draw, Made, build

INPUTS = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm": "embeddings.LayerNorm",
}
LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
KINDS = {"mean": 1, "cls": 2, "rank": 4}


def tensors_of(state: dict[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """The tensors of an encoder under their names in a file."""
    names = {ours: theirs for ours, theirs in INPUTS.items() if ours.endswith("weight")}
    vectors = {"token_embd_norm": INPUTS["token_embd_norm"]}
    for i in range(n_layers):
        vectors |= {f"blk.{i}.{ours}": f"encoder.layer.{i}.{theirs}" for ours, theirs in LAYER.items()}
    names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in vectors.items() for kind in ("weight", "bias")}
    return {ours: state[theirs] for ours, theirs in names.items()}


def metadata_of(config: Any, pooling: str) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.causal": False,
        "pooling_type": KINDS[pooling],
    }


def bert(draw: Draw, pooling: str = "") -> Made:
    """Any shape, pooled in any way."""
    n_heads, pooling = draw.one(1, 2, 3, 4), pooling or draw.one(*KINDS)
    config = transformers.BertConfig(
        vocab_size=draw.between(60, 200), hidden_size=n_heads * 4 * draw.between(2, 8),
        intermediate_size=draw.between(20, 90), num_hidden_layers=draw.between(3, 5), num_attention_heads=n_heads,
        max_position_embeddings=160, type_vocab_size=2, layer_norm_eps=draw.one(1e-12, 1e-5), num_labels=1,
        attn_implementation="eager", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ranks = pooling == "rank"
    model = build(transformers.BertForSequenceClassification if ranks else transformers.BertModel, config, draw)
    state = {name.removeprefix("bert."): tensor for name, tensor in model.state_dict().items()}
    heads = {}
    if ranks:
        heads = {"cls": "pooler.dense", "cls.output": "classifier"}
    more = {
        f"{ours}.{kind}": state[f"{theirs}.{kind}"] for ours, theirs in heads.items() for kind in ("weight", "bias")
    }
    return Made(model, "bert", metadata_of(config, pooling), tensors_of(state, config.num_hidden_layers) | more)


@torch.no_grad()
def pooled(made: Made, ids: list[int], separator: int = -1) -> Tensor:
    """What transformers has of a text: its pooled hidden states, or its score; behind a separator is a second text."""
    at = ids.index(separator) + 1 if separator in ids else len(ids)
    types = torch.tensor([[int(i >= at) for i in range(len(ids))]])
    out, kind = made.model(torch.tensor([ids]), token_type_ids=types), made.metadata["pooling_type"]
    if kind == KINDS["rank"]:
        return out.logits[0]
    rows = out.last_hidden_state[0]
    return rows.mean(dim=0) if kind == KINDS["mean"] else rows[0]
