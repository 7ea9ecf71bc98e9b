"""Conformance tests of mask rules.

from draftsmith.testing.masks import MaskTests

class TestBlocks(MaskTests):
    @pytest.fixture
    def rule(self):
        return Blocks
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.interfaces import MaskRule, Slots
from draftsmith.masks.forms import (
    additive_mask,
    concatenate_slots,
    dense_mask,
    document_slots,
    flex_block_mask,
    step_slots,
)

__all__ = ["MaskTests"]


class MaskTests:
    """What every :class:`~draftsmith.interfaces.MaskRule` must satisfy. Override the fixture ``rule``.

    Override ``slots`` as well where the rule is meant for other coordinates than rows continued by steps.
    """

    windows: tuple[int | None, ...] = (None, 1, 3, 100)
    #: Whether a window hides what is ahead by its width too, as it does in vLLM where attention is not causal.
    symmetric_window = False

    @pytest.fixture
    def rule(self) -> Callable[[int | None], MaskRule]:
        raise NotImplementedError("override the fixture `rule` with the class of the rule to test")

    def slots(self) -> tuple[Slots, Slots]:
        """Queries and keys of two documents and padding, continued by two steps."""
        rows = document_slots([5, 4], total=11)
        every = concatenate_slots([step_slots(rows, step) for step in range(3)])
        return every, every

    def test_boolean_of_the_broadcast_shape(self, rule: Callable[[int | None], MaskRule]) -> None:
        query, key = self.slots()
        for window in self.windows:
            built = rule(window)
            # Each query with every key, and keys one by one.
            for found, shape in (
                (dense_mask(built, query, key), (query.index.shape[0], key.index.shape[0])),
                (built(key, key), key.index.shape),
            ):
                assert found.dtype == torch.bool
                assert found.shape == shape

    def test_elementwise(self, rule: Callable[[int | None], MaskRule]) -> None:
        query, key = self.slots()
        for window in self.windows:
            built = rule(window)
            mask = dense_mask(built, query, key)
            for row in range(0, mask.shape[0], 4):
                for column in range(0, mask.shape[1], 3):
                    single = built(Slots(*(each[row] for each in query)), Slots(*(each[column] for each in key)))
                    assert bool(single) == bool(mask[row, column])

    def test_documents_are_isolated(self, rule: Callable[[int | None], MaskRule]) -> None:
        query, key = self.slots()
        for window in self.windows:
            mask = dense_mask(rule(window), query, key)
            assert not mask[query.document[:, None] != key.document[None, :]].any()

    def test_padding_is_never_seen(self, rule: Callable[[int | None], MaskRule]) -> None:
        query, key = self.slots()
        for window in self.windows:
            assert not dense_mask(rule(window), query, key)[:, key.document < 0].any()

    def test_the_window_hides_distant_positions_only(self, rule: Callable[[int | None], MaskRule]) -> None:
        query, key = self.slots()
        everything = dense_mask(rule(None), query, key)
        distance = query.position[:, None] - key.position[None, :]
        if self.symmetric_window:
            distance = distance.abs()
        for window in self.windows:
            if window is not None:
                expected = everything & (distance < window)
                assert torch.equal(dense_mask(rule(window), query, key), expected)

    def test_additive_form_agrees(self, rule: Callable[[int | None], MaskRule]) -> None:
        query, key = self.slots()
        for window in self.windows:
            built = rule(window)
            mask, additive = dense_mask(built, query, key), additive_mask(built, query, key)
            sees = mask.any(-1)
            assert torch.equal(additive[sees] == 0, mask[sees])
            assert torch.softmax(additive, -1).isfinite().all()

    def test_flex_form_agrees(self, rule: Callable[[int | None], MaskRule]) -> None:
        query, key = self.slots()
        for window in self.windows:
            built = rule(window)
            block = flex_block_mask(built, query, key, block_size=16)
            assert torch.equal(self._expand(block, query, key), dense_mask(built, query, key))

    @staticmethod
    def _expand(block: object, query: Slots, key: Slots) -> Tensor:
        """The element mask that a block mask stands for: its blocks and, within them, its own mask_mod."""
        mask_mod = block.mask_mod  # type: ignore[attr-defined]
        blocks = block.to_dense()[0, 0].bool()  # type: ignore[attr-defined]
        rows, columns = query.index.shape[0], key.index.shape[0]
        size_q, size_k = block.BLOCK_SIZE  # type: ignore[attr-defined]
        zero = torch.zeros((), dtype=torch.int64)
        inside = mask_mod(zero, zero, torch.arange(rows)[:, None], torch.arange(columns)[None, :])
        covered = blocks.repeat_interleave(size_q, 0)[:rows].repeat_interleave(size_k, 1)[:, :columns]
        expanded: Tensor = inside & covered
        return expanded
