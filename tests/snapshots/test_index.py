"""The file that restores most of a prompt, and how large a file will be, against comparing all and laying one out."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucevisor.model.values import Dtype
from lucevisor.snapshots.file_format import SlotRecord, lay_out, max_file_bytes
from tests.snapshots.snapshot_parts import FULL_ONLY, LAYERS, made_model, made_store, save

TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(TEXT, max_size=5),
    prompt=TEXT,
    most=st.integers(0, 11),
    layers=st.sampled_from([FULL_ONLY, LAYERS]),
)
def test_longest_match(tmp_path_factory, texts, prompt, most, layers):
    """A slot with a recurrent state or a window is a match as a whole only.  Of equal ones the last used wins."""
    now = [0.0]
    store = made_store(tmp_path_factory.mktemp("cache"), made_model(layers=layers), clock=lambda: now[0])
    for seconds, text in enumerate(texts):
        now[0] = float(seconds)
        store.close_snapshot(store.open_for_restore(save(store, SlotRecord(text, 100.0))))
    matches = []
    for entry in store.entries:
        n = 0
        while n < min(len(prompt), most, entry.n_tokens) and entry.tokens[n] == prompt[n]:
            n += 1
        if n and (layers is FULL_ONLY or n == entry.n_tokens):
            matches.append((n, entry.used_s))
    found = store.find(prompt, most)
    assert (None if found is None else (found.n_tokens, found.entry.used_s)) == max(matches, default=None)
    store.close()


@pytest.mark.parametrize("layers", [LAYERS, FULL_ONLY])
@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.Q8_0])
def test_a_file_is_never_larger_than_said(layers, kv_dtype):
    model = made_model(layers=layers, kv_dtype=kv_dtype)
    for n in (1, 14, 15, 16, 17, 100, 4097, 50_000):
        header = lay_out(model, SlotRecord([(7919 * i * i) % 248320 for i in range(n)], 1763800000.123456))
        assert header.file_bytes <= max_file_bytes(model, n) <= header.file_bytes + 20_000 + 7 * n
