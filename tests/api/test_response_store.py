"""Stored responses: bounds hold whatever is stored, and a body's reference is found however the body arrives."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.api.response_store import ResponseStore, StoredResponse, with_stored

names = st.sampled_from([f"resp_{i:x}" for i in range(8)])
keys = st.sampled_from(["", "ann"])
operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete"]), names, keys, st.integers(0, 60)), max_size=40
)


@given(operations)
@settings(max_examples=200)
def test_bounds_and_keys(todo):
    store, kept = ResponseStore(3, 100), {}
    for what, name, key, size in todo:
        if what == "put":
            if name in kept:
                continue  # ids are unique
            response = StoredResponse(b"x" * size, (b"y" * size,), key)
            store.put(name, response)
            if 2 * size <= 100:
                kept[name] = response
                while len(kept) > 3 or sum(r.n_bytes for r in kept.values()) > 100:
                    del kept[next(iter(kept))]
        elif what == "get":
            found = store.get(name, key)
            if found is None:
                assert name not in kept or kept[name].key_id != key
            else:
                assert found is kept[name]
                kept[name] = kept.pop(name)  # the most recently used
        else:
            mine = name in kept and kept[name].key_id == key
            assert store.delete(name, key) is mine
            if mine:
                del kept[name]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.text(max_size=20), st.sampled_from(["", " ", "\n\t"]))
@settings(max_examples=100)
async def test_a_reference_is_found_in_parts(sizes, text, blanks):
    store = ResponseStore(4, 1000)
    stored = StoredResponse(b"{}", (b'[{"role":"user","content":"A"}]', b"[]"), "")
    store.put("resp_ab", stored)
    store.put("resp_cd", StoredResponse(b"{}", (b"[]",), "another"))
    body = {"input": text, "previous_response_id": "resp_ab", "metadata": {"previous_response_id": "resp_cd"}}
    raw = (blanks + json.dumps(body, indent=len(blanks) or None)).encode()
    parts, at, n = [], 0, 0
    while at < len(raw):
        parts.append(raw[at : at + max(2, sizes[n % len(sizes)])])
        at += max(2, sizes[n % len(sizes)])
        n += 1
    found = await store.named_in(parts, "")
    assert found == {"resp_ab": stored}
    before = sum(map(len, parts))
    added = with_stored(parts, found)
    amended = b"".join(parts)
    assert len(amended) == before + added
    told = {"stored_responses": {"resp_ab": [[{"role": "user", "content": "A"}], []]}, **body}
    if raw.startswith(b"{"):
        assert json.loads(amended) == told
    else:
        assert json.loads(amended) in (told, body)


async def test_a_body_that_is_no_object_stays_as_it_is():
    store = ResponseStore(4, 1000)
    store.put("resp_ab", StoredResponse(b"{}", (b"[]",), ""))
    for raw in (b"", b"[", b'"previous_response_id": "resp_ab"'):
        parts = [raw] if raw else []
        assert with_stored(parts, await store.named_in(parts, "")) == 0
        assert b"".join(parts) == raw
