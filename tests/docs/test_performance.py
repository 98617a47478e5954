"""docs/performance.md: pictures belong to the results that lie in bench/results."""

import re
from pathlib import Path

import pytest

from bench.plots import IMAGES, PLOTS, RESULTS, by_model, products, save

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_is_shown_and_of_the_present_results(name):
    assert f"](images/{name}.svg)" in PAGE
    assert all((RESULTS / source).exists() for source in PLOTS[name].sources)
    drawn = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert f"results {PLOTS[name].digest()}" in drawn, f"results changed: python bench/plots.py {name}"


def test_no_picture_lacks_a_plot():
    assert set(re.findall(r"\]\(images/([\w-]+)\.svg\)", PAGE)) == set(PLOTS)


def test_products_are_read_from_the_raw_output():
    rows = products((RESULTS / "gemv-h200.txt").read_text(encoding="utf-8"))
    assert ("Q4_K", 34816 * 5120 // 256 * 144, 34.8, 41.1) in rows
    assert len(rows) == 12


def test_a_later_run_of_a_model_replaces_its_tests():
    runs = [("a", {"x": 1, "y": 2}), ("b", {"x": 3}), ("a", {"y": 4})]
    runs = [{"model": m, "tests": [{"name": n, "tokens_per_s": v} for n, v in tests.items()]} for m, tests in runs]
    found = {one["model"]: {t["name"]: t["tokens_per_s"] for t in one["tests"]} for one in by_model(runs)}
    assert found == {"a": {"x": 1, "y": 4}, "b": {"x": 3}}


def test_a_plot_names_its_results_and_is_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    for file in ("a.svg", "b.svg"):
        save(PLOTS["kv-flash"], tmp_path / file)
    first, second = ((tmp_path / file).read_text(encoding="utf-8") for file in ("a.svg", "b.svg"))
    assert first == second
    assert f"results {PLOTS['kv-flash'].digest()}" in first


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_results_name_no_directory_of_the_machine_they_come_from(path):
    assert not re.search(r'(?:^|[\s"=])/(?:[\w.-]+/){2,}', path.read_text())
