"""The guides for plugin authors: every file in them is written, every command run, in order, as an outsider would."""

from __future__ import annotations

from pathlib import Path

import pytest
from guide import Reader, blocks
from outsider import Outsider

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [DOCS / "plugins.md", *sorted((DOCS / "plugins").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_reader_can_do_what_it_says(tmp_path: Path, page: Path) -> None:
    (tmp_path / "work").mkdir()
    done = Reader(Outsider(tmp_path / "environment"), tmp_path / "work").follow(page)
    assert done or "```" not in page.read_text(encoding="utf-8")


@pytest.mark.vllm
@pytest.mark.timeout(1800)  # all of the page, two starts of vLLM and two of the kit among it
def test_a_reader_gets_an_algorithm_served_by_vllm(tmp_path: Path) -> None:
    page = DOCS / "plugins" / "first-algorithm.md"
    assert [block for block in blocks(page) if block.starts_vllm]
    (tmp_path / "work").mkdir()
    Reader(Outsider(tmp_path / "environment"), tmp_path / "work").follow(page, vllm=True)


def test_the_tutorials_are_among_them() -> None:
    assert {DOCS / "plugins" / f"first-{each}.md" for each in ("plugin", "algorithm")} <= set(PAGES)


def test_what_is_shown_of_the_examples_is_what_they_have() -> None:
    shown = [block for page in PAGES for block in blocks(page) if (ROOT / "examples" / block.file).is_file()]
    assert [block.file for block in shown] == ["draftsmith-toy/src/draftsmith_toy/network.py"]
    for block in shown:
        assert block.text == (ROOT / "examples" / block.file).read_text(encoding="utf-8")
