"""Conformance tests of training steps and of resuming, and how to compare two trainings bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from torch import Tensor

from draftsmith.checkpoint.training import (
    TrainingState,
    load_weights_into,
    random_states,
    read_checkpoint,
    read_newest,
    restore_random_states,
    trained_tensors,
    write_checkpoint,
)
from draftsmith.config.schema import TrainConfig
from draftsmith.interfaces import StateLayout
from draftsmith.train.optimizers import Optimizers, build_optimizers
from draftsmith.train.rows import derived_seed, padding_row
from draftsmith.train.setup import build_draft, build_loss
from draftsmith.train.step import Objective, score_row, train_step

if TYPE_CHECKING:
    from draftsmith.testing.algorithm import AlgorithmCase

__all__ = ["ResumeTests", "StepTests", "assert_same_training"]


def assert_same_training(first: Path, second: Path) -> None:
    """The newest checkpoints of two training folders hold the same: weights, moments, generators, step, best."""
    left, right = read_newest(first), read_newest(second)
    assert left is not None
    assert right is not None
    assert left.state == right.state
    for name in ("model", "optimizer"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.keys() == theirs.keys()
        different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
        assert not different, f"{name}: {different}"


def _start(case: AlgorithmCase, config: TrainConfig, seed: int) -> tuple[Objective, Optimizers]:
    """A fresh draft of the case, and what trains it."""
    from draftsmith.plugins import load_plugins
    from draftsmith.train.scoring import Teacher

    setup = case.algorithm.setup
    model = build_draft(case.algorithm, torch.device("cpu"), seed)
    objective = Objective(
        algorithm=case.algorithm,
        model=model,
        teacher=Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32),
        loss=build_loss(load_plugins().losses, case.registered.loss, case.registered.loss_options),
        reduction=case.registered.reduction,
        out_of_vocabulary="renormalise",
        compute_dtype=torch.float32,
    )
    return objective, build_optimizers(model, config, {setup.vocabulary.draft_size, setup.vocabulary.target_size})


class StepTests:
    """What a training step asks of a forward. Needs the fixture ``case`` of ``AlgorithmTests``."""

    @pytest.mark.parametrize("kind", ["unsupervised", "padding"])
    def test_every_weight_takes_part_in_a_row_that_trains_nothing(self, case: AlgorithmCase, kind: str) -> None:
        """Ranks wait for one another: the forward runs, and every trained weight has a gradient, which is zero.

        A row of padding alone is what training has in place of one of which no sample could be read.
        """
        setup = case.algorithm.setup
        layout = StateLayout(
            fingerprint="",
            layer_ids=setup.capture.ids(setup.verifier.num_layers),
            hidden_size=setup.verifier.hidden_size,
            dtype="float32",
        )
        row = {
            "unsupervised": attrs.evolve(case.row, loss_mask=torch.zeros_like(case.row.loss_mask)),
            "padding": padding_row(
                layout, last_hidden=setup.capture.last_is_extra(setup.verifier.num_layers), statistics=False
            ),
        }[kind]
        objective, optimizers = _start(case, TrainConfig(), seed=0)
        score = score_row(objective, row, torch.Generator().manual_seed(0))
        assert score.value.item() == 0
        score.value.backward()  # type: ignore[no-untyped-call]
        for name, parameter in objective.model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert not parameter.grad.any(), name
        before = {name: each.clone() for name, each in objective.model.state_dict().items()}
        assert not train_step(objective, optimizers, [row], [torch.Generator()], clip_norm=1.0).updated
        assert all(torch.equal(each, before[name]) for name, each in objective.model.state_dict().items())


class ResumeTests:
    """A draft restored from a checkpoint goes on bit by bit. Needs the fixture ``case`` of ``AlgorithmTests``.

    It catches state outside of parameters, buffers and the generators: a counter in a Python attribute, a cache
    filled in the first step, numbers drawn from NumPy.
    """

    STEPS = 4

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_resuming_changes_no_bit(self, case: AlgorithmCase, optimizer: str, tmp_path: Path) -> None:
        config = TrainConfig(optimizer=optimizer)  # type: ignore[arg-type]
        objective, optimizers = _start(case, config, seed=0)
        torch.manual_seed(1)
        self._train(case, objective, optimizers, 0, self.STEPS // 2)
        path = write_checkpoint(
            tmp_path,
            TrainingState(step=self.STEPS // 2, random_states=random_states()),
            trained_tensors(objective.model),
            optimizers.state_tensors(),
        )
        self._train(case, objective, optimizers, self.STEPS // 2, self.STEPS)

        resumed, resumed_optimizers = _start(case, config, seed=99)
        stored = read_checkpoint(path)
        load_weights_into(resumed.model, stored.model)
        resumed_optimizers.load_state_tensors(stored.optimizer)
        restore_random_states(stored.state.random_states)
        self._train(case, resumed, resumed_optimizers, self.STEPS // 2, self.STEPS)

        self._assert_equal(objective.model.state_dict(), resumed.model.state_dict())
        self._assert_equal(optimizers.state_tensors(), resumed_optimizers.state_tensors())

    def _train(self, case: AlgorithmCase, objective: Objective, optimizers: Optimizers, first: int, last: int) -> None:
        objective.model.train()
        for step in range(first, last):
            optimizers.set_rate(1 / (1 + step))
            generator = torch.Generator().manual_seed(derived_seed(0, "row", step, 0))
            result = train_step(objective, optimizers, [case.row], [generator], clip_norm=1.0)
            assert result.updated

    def _assert_equal(self, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
        assert ours.keys() == theirs.keys()
        assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
