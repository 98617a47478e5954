"""Pictures of measurements are drawn from the results that lie in bench/results."""

import re

import pytest

from bench.plots import IMAGES, PLOTS, RESULTS


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_is_of_the_present_results(name):
    drawn = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert f"results {PLOTS[name].digest()}" in drawn, f"results changed: python bench/plots.py {name}"


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_results_name_no_directory_of_the_machine_they_come_from(path):
    assert not re.search(r'(?:^|[\s"=])/(?:[\w.-]+/){2,}', path.read_text())
