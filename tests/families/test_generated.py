"""Random tiny models of every family, of other shapes than the golden ones, against transformers run beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from lucevisor.model.families import open_spec
from tests.families.generate import FAMILIES
from tests.families.generate.made import Draw, Made, reference
from tests.families.pipeline import Pipeline, load_stages
from tests.families.rounding import load_exact
from tests.numerics import Bound, Exact

CONSTANTS = 0.03
"""Of what rounding explains, for both in exact arithmetic: constants that one of the two keeps in float32."""
N_TOKENS = 70
QUICK, ALL = 2, 24


def seeds() -> list[object]:
    """Few by default, all with ``-m slow``."""
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(f, s, id=f"{f}-{s}", marks=marks[s < QUICK]) for f in FAMILIES for s in range(ALL)]


def made_with_clear_choices(family: str, seed: int) -> tuple[Made, list[int], Bound, Draw]:
    """The first model from ``seed`` on where no choice of experts hangs on rounding."""
    while True:
        draw = Draw(seed)
        made = FAMILIES[family](draw)
        ids = draw.ids(N_TOKENS, made.vocabulary)
        theirs, clear = reference(made.model, ids)
        if clear:
            return made, ids, theirs, draw
        seed += 1000


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(("family", "seed"), seeds())
def test_random_models_agree_with_transformers(family: str, seed: int, tmp_path: Path) -> None:
    made, ids, theirs, draw = made_with_clear_choices(family, seed)
    spec = open_spec(made.write(tmp_path / "model.gguf"))
    assert spec.skipped == ()
    layer_split = [b for b in range(1, spec.n_layers) if spec.legal_boundary(b) and draw.flag()]
    for split, size in (((), N_TOKENS), (layer_split, draw.one(1, 13, 40, 64))):
        pipeline = Pipeline(spec, load_stages(spec, split))
        pipeline.open(0)
        worst = theirs.worst(pipeline.run_in_chunks(0, ids, size))
        assert worst <= 1.0, f"split {list(split)}, chunks of {size}: {worst:.2f} times what rounding explains"
    stages = load_exact(lambda: load_stages(spec))
    with Exact():
        pipeline = Pipeline(spec, stages)
        pipeline.open(0)
        assert theirs.worst(pipeline.run((0, ids))) < CONSTANTS
