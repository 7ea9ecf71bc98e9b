"""The focal loss under draftsmith's conformance kit, and against its definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import draftsmith_focal
from draftsmith.interfaces import PositionLoss
from draftsmith.testing.losses import LossTests, teacher_chunk
from draftsmith.testing.public import private_imports
from draftsmith_focal.losses import Focal


class TestFocal(LossTests):
    zero_at_teacher = False

    @pytest.fixture(params=[0.0, 0.5, 2.0])
    def loss(self, request: pytest.FixtureRequest) -> PositionLoss:
        return Focal(gamma=request.param)


def test_it_is_what_its_name_says() -> None:
    logits = torch.tensor([[0.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    teacher = teacher_chunk(torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
    sure = 1 / (1 + torch.exp(torch.tensor(-3.0, dtype=torch.float64)))
    wanted = torch.stack([0.5**2 * torch.tensor(2.0, dtype=torch.float64).log(), -((1 - sure) ** 2) * sure.log()])
    torch.testing.assert_close(Focal(gamma=2.0).value(logits, teacher), wanted)


def test_without_focus_it_is_the_cross_entropy() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher = teacher_chunk(logits.flip(0))
    torch.testing.assert_close(
        Focal(gamma=0.0).value(logits, teacher),
        torch.nn.functional.cross_entropy(logits, teacher.top, reduction="none"),
    )


def test_it_imports_nothing_private() -> None:
    assert not private_imports(Path(draftsmith_focal.__file__).parent)
