"""Who sees whom, as the worked examples have it, read off the attention that is trained with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.attention import AnchoredBlocks
from draftsmith.errors import ConfigError
from draftsmith.interfaces import MaskRule
from draftsmith.masks.rules import Anchored, AnchoredCausal, Causal, Chained
from draftsmith_dflash.mask import Attend, block_attention, check_causality, check_context
from draftsmith_dflash.options import DFlashOptions, LayerAttention, layer_attention

# Six tokens, blocks of three at the anchors 1 and 3: columns are the context rows, then the rows of both blocks.
BIDIRECTIONAL = """
#..... ### ...
#..... ### ...
#..... ### ...
###... ... ###
###... ... ###
###... ... ###
"""
CAUSAL_WINDOW_3 = """
#..... #.. ...
#..... ##. ...
...... ### ...
.##... ... #..
..#... ... ##.
...... ... ###
"""
#: As wide to both sides where attention is not causal: here to the whole block.
WINDOW_3 = """
#..... ### ...
#..... ### ...
...... ### ...
.##... ... ###
..#... ... ###
...... ... ###
"""
WINDOW_2 = """
#..... ##. ...
...... ### ...
...... .## ...
..#... ... ##.
...... ... ###
...... ... .##
"""
#: The document begins at row 2: only its rows are seen.
TWO_DOCUMENTS = """
#..... ### ...
#..... ### ...
#..... ### ...
..#... ... ###
..#... ... ###
..#... ... ###
"""


def visible(attend: Attend, blocks: AnchoredBlocks, layer: LayerAttention) -> str:
    """Weights of zero queries and keys are even over what is seen, and values that are one-hot show them."""
    rows, context = len(blocks) * blocks.block_size, 6
    values = torch.eye(context + rows)[:, None]
    keys = torch.zeros_like(values)
    query = torch.zeros(rows, 1, context + rows)
    seen = attend(query, keys[:context], values[:context], keys[context:], values[context:], blocks, layer)[:, 0] > 0
    lines = ["".join("#" if each else "." for each in row) for row in seen.tolist()]
    return "\n" + "".join(f"{line[:6]} {line[6:9]} {line[9:]}\n" for line in lines)


@pytest.mark.parametrize("form", ["auto", "linear", "dense", "flex"])
@pytest.mark.parametrize(
    ("options", "layer", "lengths", "expected"),
    [
        ({}, 0, (6,), BIDIRECTIONAL),
        ({"sliding_window": 3, "sliding_window_non_causal": False}, 0, (6,), CAUSAL_WINDOW_3),
        ({"sliding_window": 3}, 0, (6,), WINDOW_3),
        ({"sliding_window": 2}, 0, (6,), WINDOW_2),
        ({"sliding_window": 2048}, 0, (6,), BIDIRECTIONAL),
        ({"sliding_window": 3, "full_attention_indices": (1,)}, 0, (6,), WINDOW_3),
        ({"sliding_window": 3, "full_attention_indices": (1,)}, 1, (6,), BIDIRECTIONAL),
        ({}, 0, (2, 4), TWO_DOCUMENTS),
    ],
)
def test_worked_examples(form: Any, options: dict[str, Any], layer: int, lengths: Any, expected: str) -> None:
    kinds = layer_attention(DFlashOptions(num_layers=2, **options))
    blocks = AnchoredBlocks(anchors=(1, 3), document_lengths=lengths, block_size=3)
    attend = block_attention(Anchored(kinds[layer].window), form)
    assert visible(attend, blocks, kinds[layer]) == expected


def test_another_rule_is_attended_densely() -> None:
    class Blind(Anchored):
        """Sees its own block only."""

        def __call__(self, query: Any, key: Any) -> Any:
            return super().__call__(query, key) & (key.step > 0)

    blocks = AnchoredBlocks(anchors=(1, 3), document_lengths=(6,), block_size=3)
    for form in ("auto", "dense"):
        seen = visible(block_attention(Blind(None), form), blocks, LayerAttention(None, causal=False))  # type: ignore[arg-type]
        assert seen == "\n" + "...... ### ...\n" * 3 + "...... ... ###\n" * 3


@pytest.mark.parametrize("form", ["linear", "flex"])
def test_forms_that_only_the_built_in_rule_has(form: Any) -> None:
    with pytest.raises(ConfigError, match="the mask Causal has no"):
        block_attention(Causal(None), form)


def test_a_rule_does_not_make_layers_causal_that_are_served_otherwise() -> None:
    causal = DFlashOptions(sliding_window=4, sliding_window_non_causal=False)
    check_causality(AnchoredCausal(4), layer_attention(causal))
    check_causality(Anchored(None), layer_attention(DFlashOptions()))
    mixed = DFlashOptions(num_layers=3, sliding_window=4, sliding_window_non_causal=False, full_attention_indices=(1,))
    with pytest.raises(ConfigError, match=r"vLLM would serve layers \[1\] seeing their whole block") as caught:
        check_causality(AnchoredCausal(4), layer_attention(mixed))
    assert caught.value.problems[0].where == "mask"


@pytest.mark.parametrize("rule", [Causal, Chained])
def test_a_rule_does_not_show_features_that_do_not_exist_yet(rule: type[MaskRule]) -> None:
    check_context(Anchored(None))
    check_context(AnchoredCausal(3))
    with pytest.raises(
        ConfigError, match=f"the mask {rule.__name__} shows blocks the features of their own anchor"
    ) as caught:
        check_context(rule(None))
    assert caught.value.problems[0].where == "mask"
