"""Who sees whom, as the worked example has it, read off the attention that is trained with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.attention import Continuations
from draftsmith.errors import ConfigError
from draftsmith.masks.rules import Causal, Chained
from draftsmith_peagle.mask import Attend, element_attention

# Six rows; depth 1 after rows 0, 1, 3 and 4, depth 2 after 0 and 3, depth 3 after 0. Columns: the rows, then elements
# chain after chain, 0b 0c 0d 1b 3b 3c 4b; lines: rows 0, 2 and 5, then the elements.
CHAINS = Continuations(rows=(0, 1, 3, 4), lengths=(3, 1, 2, 1), document_lengths=(6,))
EVERYTHING = """
#..... .......
###... .......
###### .......
#..... #......
#..... ##.....
#..... ###....
##.... ...#...
####.. ....#..
####.. ....##.
#####. ......#
"""
WINDOW_3 = """
#..... .......
###... .......
...### .......
#..... #......
#..... ##.....
...... ###....
##.... ...#...
..##.. ....#..
...#.. ....##.
...##. ......#
"""
#: The second document begins at row 2.
TWO_DOCUMENTS = """
#..... .......
..#... .......
..#### .......
#..... #......
#..... ##.....
#..... ###....
##.... ...#...
..##.. ....#..
..##.. ....##.
..###. ......#
"""


def visible(attend: Attend, chains: Continuations) -> str:
    """Weights of zero queries and keys are even over what is seen, and values that are one-hot show them."""
    rows, total = 6, 6 + len(chains)
    values = torch.eye(total)[:, None]
    keys = torch.zeros_like(values)
    query = torch.zeros(total, 1, total)
    parts = attend(query[:rows], keys[:rows], values[:rows], query[rows:], keys[rows:], values[rows:], chains)
    seen = torch.cat((parts[0][[0, 2, 5]], parts[1]))[:, 0] > 0
    lines = ["".join("#" if each else "." for each in row) for row in seen.tolist()]
    return "\n" + "".join(f"{line[:6]} {line[6:]}\n" for line in lines)


@pytest.mark.parametrize("form", ["auto", "linear", "dense", "flex"])
@pytest.mark.parametrize(
    ("window", "lengths", "expected"),
    [
        (None, (6,), EVERYTHING),
        (2048, (6,), EVERYTHING),
        (3, (6,), WINDOW_3),
        (None, (2, 4), TWO_DOCUMENTS),
    ],
)
def test_worked_examples(form: Any, window: int | None, lengths: tuple[int, ...], expected: str) -> None:
    chains = Continuations(rows=CHAINS.rows, lengths=CHAINS.lengths, document_lengths=lengths)
    assert visible(element_attention(Chained(window), form), chains) == expected


def test_another_rule_is_attended_densely() -> None:
    class Forgetful(Chained):
        """Of its own chain, an element sees itself only."""

        def __call__(self, query: Any, key: Any) -> Any:
            return super().__call__(query, key) & ((key.step == 0) | (key.step == query.step))

    expected = EVERYTHING.replace(" ##.....", " .#.....").replace(" ###....", " ..#....").replace("....##.", ".....#.")
    for form in ("auto", "dense"):
        assert visible(element_attention(Forgetful(None), form), CHAINS) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["linear", "flex"])
def test_forms_that_only_the_built_in_rule_has(form: Any) -> None:
    with pytest.raises(ConfigError, match="the mask Causal has no"):
        element_attention(Causal(None), form)
