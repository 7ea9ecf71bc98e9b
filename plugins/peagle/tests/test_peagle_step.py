"""What is averaged, and that every weight takes part in every step."""

from __future__ import annotations

import attrs
import pytest
import torch

from draftsmith.losses.divergence import ForwardKL
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, tiny_case
from draftsmith.train.scoring import Teacher
from draftsmith.train.step import Objective, score_row


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "llama")


@pytest.fixture(scope="module")
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "peagle", options={"num_depths": 5, "num_layers": 2}, draft_size=64)


def objective(case: AlgorithmCase) -> Objective:
    setup = case.algorithm.setup
    return Objective(
        algorithm=case.algorithm,
        model=case.algorithm.build_model(),
        teacher=Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32),
        loss=ForwardKL(),
        reduction=case.registered.reduction,
        out_of_vocabulary="renormalise",
        compute_dtype=torch.float32,
    )


def test_the_loss_is_the_mean_over_all_elements(case: AlgorithmCase) -> None:
    """Whatever their depth: deeper ones weigh less only in that there are fewer."""
    score = score_row(objective(case), case.row, torch.Generator().manual_seed(0))
    assert score.scored is not None
    counts = torch.bincount(score.slots.step, minlength=5)
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)
    assert counts[3] > 0
    torch.testing.assert_close(score.value, score.scored.loss.mean())


def test_every_weight_takes_part_where_no_token_is_continued(case: AlgorithmCase) -> None:
    """Two supervised tokens: the next one can be trained, and nothing behind it. Ranks wait for each other's masks."""
    mask = torch.zeros_like(case.row.loss_mask)
    mask[5:7] = True
    row = attrs.evolve(case.row, loss_mask=mask)
    whole = objective(case)
    score = score_row(whole, row, torch.Generator().manual_seed(0))
    assert score.slots.step.tolist() == [0]
    score.value.backward()  # type: ignore[no-untyped-call]
    for name, parameter in whole.model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert bool(parameter.grad.any()) is not name.startswith("mask_"), name


def test_a_row_of_which_all_but_one_have_a_target(material: Material) -> None:
    """Rows and elements are told apart by where they stand, not by how many there are."""
    case = tiny_case(material, "peagle", options={"num_depths": 1, "num_layers": 1})
    for document in case.documents:
        mask = torch.ones_like(document.loss_mask)
        batch = case.algorithm.make_batch(attrs.evolve(document, loss_mask=mask), torch.Generator())
        count = max(document.input_ids.shape[0] - 2, 0)  # the last row has no target
        hidden = case.algorithm.build_model()(batch, case.algorithm.attend)  # type: ignore[attr-defined]
        assert hidden.shape[0] == batch.teacher_row.shape[0] == count
