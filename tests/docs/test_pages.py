"""Documents name what exists: links between pages with their headings, files of the project, the map of packages."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "README.md"], key=lambda page: page.as_posix()
)
FILE = re.compile(r"`((?:lucevisor|daemons|tests|bench|etc|docs)/[\w./-]+\.(?:py|md|toml|txt|json))(?:::?[\w.]+)?`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(page):
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@cache
def anchors(page):
    """Anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = []
    for target, anchor in LINK.findall(prose(page)):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_named_exist(page):
    assert not [file for file in FILE.findall(prose(page)) if "NAME" not in file and not (ROOT / file).exists()]


def test_the_map_of_packages_is_the_tree():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(r"^lucevisor/ .*?^tests/", text, re.MULTILINE | re.DOTALL)
    assert found
    supervisor, daemon = re.split(r"^daemons/", found[0], flags=re.MULTILINE)
    for root, part in (("lucevisor", supervisor), ("daemons", daemon)):
        listed = set(re.findall(r"^  (\w+)/", part, re.MULTILINE))
        tree = {path.parent.name for path in (ROOT / root).glob("*/__init__.py")}
        assert listed == tree, root


def test_decisions_are_numbered_once_and_as_their_titles_say():
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert [page.name[:4] for page in decisions] == [f"{n:04}" for n in range(1, len(decisions) + 1)]
    wrong = [page.name for page in decisions if not re.match(rf"# {int(page.name[:4])}\. ", page.read_text())]
    assert not wrong
