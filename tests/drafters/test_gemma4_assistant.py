"""Gemma 4 assistants against transformers: drafts and their logits, behind prompts, chunks and verified drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from bench.gguf_writing import Value
from lucevisor.model.families import open_spec
from lucevisor.protocol.loading import DraftKind
from tests.drafters.drafted import DraftedPipeline, load_draft
from tests.families.generate.gemma4 import NAMES, gemma4
from tests.families.generate.made import PLAIN, Draw, Made, build, ends, renamed
from tests.families.pipeline import load_stages

ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}


def make_assistant(target: Made, draw: Draw, n_layers: int = 3) -> Made:
    """An assistant of a random gemma4 model; its last layer is full, the others slide."""
    of: Any = target.model.config
    sliding = [True] * (n_layers - 1) + [False]
    kinds, kv = of.layer_types, target.metadata["attention.head_count_kv"]
    assert isinstance(kv, list)
    wide = target.metadata["attention.key_length"]
    text = transformers.Gemma4TextConfig(
        vocab_size=of.vocab_size,
        hidden_size=draw.between(17, 40),
        intermediate_size=draw.between(20, 60),
        num_hidden_layers=n_layers,
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=kv[kinds.index("sliding_attention")],
        head_dim=target.metadata["attention.key_length_swa"],
        max_position_embeddings=512,
        sliding_window=of.sliding_window,
        layer_types=["sliding_attention"] * (n_layers - 1) + ["full_attention"],
        per_layer_config={n_layers - 1: {"head_dim": wide, "num_key_value_heads": kv[kinds.index("full_attention")]}},
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=n_layers,
        rope_parameters=ROPE,
        **PLAIN,
    )
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=of.hidden_size)
    # transformers 5.23 refuses what its assistants are: models all of whose layers read the keys of another
    modes = property(lambda _: ["reuse"] * n_layers)
    with mock.patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", modes):
        model = build(transformers.Gemma4AssistantForCausalLM, config, draw)
    state = model.state_dict()
    tensors = renamed(state, NAMES, n_layers) | ends(state, tied=True)
    tensors["nextn.pre_projection.weight"] = state["pre_projection.weight"]
    tensors["nextn.post_projection.weight"] = state["post_projection.weight"]
    tensors["rope_freqs.weight"] = target.tensors["rope_freqs.weight"]
    own = ("context_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.head_count")
    taken = [*own, *(key for key in target.metadata if key.startswith(("rope.", "attention.key", "attention.value")))]
    metadata: dict[str, Value] = {key: target.metadata[key] for key in taken} | {
        "block_count": n_layers,
        "nextn_predict_layers": n_layers,
        "embedding_length": text.hidden_size,
        "embedding_length_out": of.hidden_size,
        "feed_forward_length": text.intermediate_size,
        "attention.sliding_window_pattern": sliding,
    }
    return Made(model, "gemma4-assistant", metadata, tensors)


class Reference:
    """The target and its assistant in transformers."""

    def __init__(self, target: nn.Module, assistant: nn.Module) -> None:
        self.target: Any = target
        self.assistant: Any = assistant
        config = self.target.config
        first_shared = config.num_hidden_layers - config.num_kv_shared_layers
        kinds = config.layer_types[:first_shared]
        for kind in set(kinds):  # transformers stores them only if the target shares keys itself
            last = first_shared - 1 - kinds[::-1].index(kind)
            self.target.model.layers[last].self_attn.store_full_length_kv = True

    @torch.no_grad()
    def drafts(self, ids: list[int], newest: int, n: int) -> tuple[list[int], Tensor]:
        """``n`` drafts behind ``newest``, which follows ``ids``, and their logits [n, V]."""
        out = self.target.model(
            input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        hidden, token = out.last_hidden_state[:, -1:], torch.tensor([[newest]])
        tokens, logits = [], []
        for _ in range(n):
            found = self.assistant(
                inputs_embeds=torch.cat((self.target.model.embed_tokens(token), hidden), dim=-1),
                position_ids=torch.tensor([[len(ids)]]),
                shared_kv_states=dict(out.shared_kv_states),
            )
            hidden, token = found.last_hidden_state, found.logits.argmax(dim=-1)
            tokens.append(int(token))
            logits.append(found.logits[0, 0])
        return tokens, torch.stack(logits)


def write_pair(directory: Path, target: Made, assistant: Made) -> tuple[Path, Path]:
    """Both as GGUF files."""
    return target.write(directory / "target.gguf"), assistant.write(directory / "assistant.gguf")


N = 4
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 6, 20))]
"""Random models with both kinds of attention behind the first layer, with and without shared keys, keys as values."""


def pair(seed: int, directory: Path) -> tuple[Made, Made, DraftedPipeline]:
    draw = Draw(seed)
    target = gemma4(draw)
    assistant = make_assistant(target, draw)
    model, path = write_pair(directory, target, assistant)
    spec = open_spec(model)
    draft = load_draft(spec, path, DraftKind.MTP)
    stages = load_stages(spec, captures=draft.spec.captures)
    return target, assistant, DraftedPipeline(spec, stages, draft)


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_drafts_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    target, assistant, pipeline = pair(seed, tmp_path)
    ids = Draw(seed + 1).ids(61, target.vocabulary)
    reference = Reference(target.model, assistant.model)
    pipeline.open(0)
    pipeline.run((0, ids[:30]))
    pipeline.draft([[]], 0)
    pipeline.run((0, ids[30:50]))
    [found] = pipeline.draft([[ids[50]]], N)
    wanted, logits = reference.drafts(ids[:50], ids[50], N)
    assert found.tokens == wanted
    best = logits.softmax(dim=-1).max(dim=-1).values
    assert found.probabilities == pytest.approx(best.tolist(), rel=1e-3)
    # One draft is accepted, the others were wrong: their keys are overwritten.
    wrong = [ids[51], *((t + 1) % target.vocabulary for t in ids[52:55])]
    pipeline.verify((0, [ids[50], *wrong], N))
    [found] = pipeline.draft([[ids[51], ids[52]]], N)
    pipeline.accept(0, N, 1)
    wanted, _ = reference.drafts(ids[:52], ids[52], N)
    assert found.tokens == wanted
