"""docs/snapshot-format.md: its example runs, its tables are those of the code."""

import json
import re
from pathlib import Path

from lucevisor.snapshots.file_format import FORMAT, FORMAT_VERSION, lay_out, pack
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model
from tests.snapshots.snapshot_parts import made_model, made_slot, made_store, names

PAGE = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text(encoding="utf-8")


def test_the_example_reads_a_snapshot_of_a_real_model(tmp_path, capsys):
    spec = golden_spec("qwen35")
    pipeline = SlotPipeline(spec)
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, 70))
    store = made_store(tmp_path, state_model(spec), disk_bytes=1 << 30)
    entry = pipeline.save(store, ids_of(spec, 70), checkpoint(pipeline, 0, 5))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found = {"path": tmp_path / entry.file}
    exec(example, found)
    assert found["tokens"].tolist() == ids_of(spec, 70)
    assert found["keys"].shape == (70, *spec.layers[3].state[0].shape[1:])
    assert "70" in capsys.readouterr().out.splitlines()[-1]
    store.close()


def test_every_key_is_described():
    metadata = json.loads(pack(lay_out(made_model(), made_slot()))[8:])["__metadata__"]
    table = PAGE.split("### Metadata")[1].split("### Integrity")[0]
    keys, fields = table.split("| field of `slot` |")
    for text, expected in ((keys, metadata), (fields, json.loads(metadata["slot"]))):
        rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == set(expected)
    assert f"`{FORMAT}`, `{FORMAT_VERSION}`" in table


def test_the_names_in_the_directory(tmp_path):
    store = made_store(tmp_path)
    writing = store.begin(made_slot())
    pattern = re.search(r"`(lucevisor-MODEL-SLOT\.RANDOM\.partial)`", PAGE)[1]
    regex = pattern.replace("MODEL", "[0-9a-f]{16}").replace("SLOT", "[0-9a-f]{16}").replace("RANDOM", "[0-9a-f]{16}")
    assert re.fullmatch(regex, writing.path.name)
    assert f"`{next(p.name for p in tmp_path.iterdir() if p.name not in names(tmp_path))}`" in PAGE
    store.abort(writing, "end")
    store.close()
