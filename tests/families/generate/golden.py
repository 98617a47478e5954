"""Makes golden files: ``python -m tests.families.generate.golden NAME FOLDER`` (contents: tests/data/golden/README.md).

The vocabulary is that of the golden file ``qwen3``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader, GGUFValueType
from torch import Tensor, nn

from bench.gguf_writing import finish, new_file
from tests.families.generate import bert, gemma3, gpt_oss, llama, qwen
from tests.families.generate.made import PLAIN, Draw, Made, build

N_TOKENS, PROMPT, GREEDY, VOCABULARY = 72, 40, 32, 288
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None, **PLAIN,
}  # fmt: skip
GRANITE: dict[str, Any] = COMMON | {
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "attention_multiplier": 0.03125, "logits_scaling": 8.0,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}


def made_llama(draw: Draw) -> Made:
    """Frequencies as in Llama 3, an output matrix of its own."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 128
    config: Any = transformers.LlamaConfig(
        **COMMON, num_hidden_layers=4, head_dim=32, rope_parameters=rope, tie_word_embeddings=False
    )
    return llama.of_llama(build(transformers.LlamaForCausalLM, config, draw), {})


def made_qwen2(draw: Draw) -> Made:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 numbers each
    config: Any = transformers.Qwen2Config(
        **COMMON | heads, num_hidden_layers=4, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True,
        use_sliding_window=False,
    )  # fmt: skip
    return llama.of_qwen2(build(transformers.Qwen2ForCausalLM, config, draw))


def made_qwen3moe(draw: Draw) -> Made:
    config: Any = transformers.Qwen3MoeConfig(
        **COMMON, num_hidden_layers=3, head_dim=32, rope_parameters=PLAIN_ROPE, tie_word_embeddings=False,
        num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=48, decoder_sparse_step=1,
        mlp_only_layers=[],
    )  # fmt: skip
    return llama.of_qwen3moe(build(transformers.Qwen3MoeForCausalLM, config, draw), divide=True)


def made_gemma3(draw: Draw) -> Made:
    """The published period of layers, positions of the full ones divided."""
    rope = {"full_attention": PLAIN_ROPE | {"rope_type": "linear", "factor": 8.0}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(7)]
    config: Any = transformers.Gemma3TextConfig(
        **COMMON, num_hidden_layers=7, head_dim=32, query_pre_attn_scalar=32, sliding_window=12, layer_types=kinds,
        rope_parameters=rope, use_bidirectional_attention=False,
    )  # fmt: skip
    return gemma3.of_config(config, draw, pattern=None, linear=True)


def made_glm4moe(draw: Draw) -> Made:
    """A dense layer, biases, and half of each head rotates."""
    rope = PLAIN_ROPE | {"partial_rotary_factor": 0.5}
    config: Any = transformers.Glm4MoeConfig(
        **COMMON, num_hidden_layers=4, head_dim=32, rope_parameters=rope, tie_word_embeddings=False,
        attention_bias=True, use_qk_norm=True, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=48, routed_scaling_factor=2.5, n_group=1, topk_group=1, first_k_dense_replace=1,
        norm_topk_prob=True,
    )  # fmt: skip
    return llama.of_glm4moe(build(transformers.Glm4MoeForCausalLM, config, draw), 16, divide=True)


def made_granite(draw: Draw) -> Made:
    """The scales of Granite 3.3, that of the attention 1 / D."""
    return llama.of_granite(build(transformers.GraniteForCausalLM, transformers.GraniteConfig(**GRANITE), draw))


def made_granitemoe(draw: Draw) -> Made:
    config: Any = transformers.GraniteMoeSharedConfig(
        **GRANITE, num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=48
    )
    return llama.of_granitemoe(build(transformers.GraniteMoeSharedForCausalLM, config, draw))


def made_mistral3(draw: Draw) -> Made:
    """Texts of two and a half original contexts."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    config: Any = transformers.Ministral3Config(
        **COMMON, num_hidden_layers=4, head_dim=32, rope_parameters=rope, tie_word_embeddings=False
    )
    return llama.of_mistral3(build(transformers.Ministral3ForCausalLM, config, draw))


def made_qwen3next(draw: Draw) -> Made:
    """Two value heads for a key head.  Matrices of few bits, which keeps the repository small."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config: Any = transformers.Qwen3NextConfig(
        **COMMON | heads, num_hidden_layers=3, head_dim=32, tie_word_embeddings=False,
        rope_parameters=PLAIN_ROPE | {"partial_rotary_factor": 0.25},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    model = build(transformers.Qwen3NextForCausalLM, config, draw, centred_norms=True)
    for tensor in model.parameters():
        if tensor.dim() > 1:
            tensor.data = tensor.data.bfloat16().float()
    return qwen.of_qwen3next(model, qwen.hybrid_metadata(config, draw), merged=False)


def made_gpt_oss(draw: Draw) -> Made:
    """A sliding layer, a full one, a sliding one; texts of two original contexts."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    rope = {"rope_theta": 1.5e5} | gpt_oss.yarn(32.0, 32)
    config = transformers.GptOssConfig(
        **COMMON | heads, num_hidden_layers=3, head_dim=32, rope_parameters=rope, tie_word_embeddings=True,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return gpt_oss.of_config(config, draw, divide=True, pattern=None)


MODELS: dict[str, Callable[[Draw], Made]] = {
    "gemma3": made_gemma3,
    "llama": made_llama,
    "qwen2": made_qwen2,
    "qwen3moe": made_qwen3moe,
    "granite": made_granite,
    "mistral3": made_mistral3,
    "glm4moe": made_glm4moe,
    "granitemoe": made_granitemoe,
    "qwen3next": made_qwen3next,
    "gpt_oss": made_gpt_oss,
}
"""A model's place is the seed it is drawn with: new ones go to the end."""


def hidden_and_logits(model: nn.Module, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Rows behind the embedding and behind each layer [L+1, T, E], not normed, and logits [T, V]."""
    rows: list[Tensor] = []
    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, args: rows.append(args[0][0]))]
    hooks += [
        layer.register_forward_hook(lambda _, __, out: rows.append(out[0] if isinstance(out, Tensor) else out[0][0]))
        for layer in layers
    ]
    with torch.no_grad():
        [logits] = model(torch.tensor([ids]), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return torch.stack(rows), logits


Pooled = Callable[[Made, list[int]], Tensor]
TEXTS = (1, 7, 33, 64, 90, 7)
"""Tokens of the texts of a golden file of embeddings."""


def made_qwen3_embedding(draw: Draw) -> Made:
    made = qwen.qwen3(draw)
    tensors = {name: tensor for name, tensor in made.tensors.items() if name != "output.weight"}
    return replace(made, metadata=made.metadata | {"pooling_type": 3}, tensors=tensors)


def last_row(made: Made, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return made.model.model(torch.tensor([ids])).last_hidden_state[0, -1]


EMBEDDERS: dict[str, tuple[Callable[[Draw], Made], Pooled]] = {
    "bert": (partial(bert.bert, pooling="mean"), bert.pooled),
    "gemma_embedding": (partial(gemma3.gemma_embedding, dense=True), gemma3.pooled),
    "qwen3_embedding": (made_qwen3_embedding, last_row),
}
"""Models that only pool: they have golden embeddings, and neither logits nor a tokenizer."""


def write_embeddings(name: str, folder: Path) -> None:
    make, pooled = EMBEDDERS[name]
    draw = Draw(list(EMBEDDERS).index(name))
    made = make(draw)
    texts = [draw.ids(n, made.vocabulary) for n in TEXTS]
    rows = np.stack([pooled(made, text).numpy() for text in texts])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "golden.npz", ids=np.concatenate(texts), lengths=np.array(TEXTS), pooled=rows)
    (folder / "hf_config.json").write_text(
        json.dumps(made.model.config.to_diff_dict(), indent=1, sort_keys=True) + "\n"
    )
    made.write(folder / "model.gguf")


def write(name: str, folder: Path) -> None:
    if name in EMBEDDERS:
        write_embeddings(name, folder)
        return
    draw = Draw(list(MODELS).index(name))
    made = MODELS[name](draw)
    ids = draw.ids(N_TOKENS, VOCABULARY)
    hidden, logits = hidden_and_logits(made.model, ids)
    greedy, margins = list[int](), list[float]()
    while len(greedy) < GREEDY:
        best = hidden_and_logits(made.model, ids[:PROMPT] + greedy)[1][-1].topk(2)
        greedy.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / "golden.npz",
        input_ids=np.array(ids),
        logits=logits.numpy(),
        hidden=hidden.numpy(),
        prompt_len=np.array(PROMPT),
        greedy=np.array(greedy),
        greedy_margin_min=np.array(min(margins)),
    )
    (folder / "hf_config.json").write_text(
        json.dumps(made.model.config.to_diff_dict(), indent=1, sort_keys=True) + "\n"
    )
    writer = new_file(folder / "model.gguf", made.architecture, made.metadata)
    writer.add_name(f"tiny-{name}")
    vocabulary = GGUFReader(Path(__file__).parents[2] / "data/golden/qwen3/model.gguf")
    for key, found in vocabulary.fields.items():
        if key.startswith("tokenizer."):
            kind, *inner = found.types
            sub_type = inner[-1] if kind is GGUFValueType.ARRAY else None
            writer.add_key_value(key, found.contents(), kind, sub_type=sub_type)
    for tensor_name, tensor in made.tensors.items():
        writer.add_tensor(tensor_name, np.ascontiguousarray(tensor.detach().to(torch.float32).numpy()))
    finish(writer)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
