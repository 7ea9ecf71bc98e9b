"""Schedules, which optimiser takes what, and that optimiser state survives being saved."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from draftsmith.config.schema import TrainConfig
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import DraftArchitecture
from draftsmith.train.optimizers import build_optimizers, muon_names
from draftsmith.train.schedule import rate_factor, warmup_steps


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 8)
        self.inner = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 100, bias=False)
        self.score = nn.Linear(12, 1)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        hidden = self.norm(self.inner(self.table(ids)))
        return self.head(hidden) + self.score(hidden)


def learn(network, optimizers, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizers.set_rate(1 / (1 + step))
        optimizers.zero_grad()
        network(torch.randint(7, (5,), generator=generator)).square().mean().backward()
        optimizers.step()


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warmup_rises_to_the_peak_and_never_wastes_a_step(kind):
    factors = [rate_factor(kind, step, 100, 10) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert min(factors) > 0
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_shapes_of_the_decay():
    assert rate_factor("constant", 99, 100, 0) == 1.0
    assert rate_factor("linear", 50, 100, 0) == pytest.approx(0.5)
    assert rate_factor("cosine", 50, 100, 0) == pytest.approx(0.5)
    assert rate_factor("cosine", 25, 100, 0) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    with pytest.raises(ValueError, match="sawtooth"):
        rate_factor("sawtooth", 1, 10, 0)


@pytest.mark.parametrize(("total", "share", "expected"), [(100, 0.04, 4), (1, 0.5, 0), (2, 0.99, 1), (10, 0.0, 0)])
def test_warmup_never_takes_the_whole_run(total, share, expected):
    assert warmup_steps(total, share) == expected


def test_muon_takes_hidden_matrices_alone():
    assert muon_names(Network(), {100}) == {"inner.weight"}


class Draft(Network, DraftArchitecture):
    """Says which of its matrices has a row for every token."""

    def shared_tensors(self):
        return {}

    def vocabulary_tensors(self):
        return {"head.weight"}


@pytest.mark.parametrize("size", [8, 12, 100])
def test_a_matrix_that_is_as_long_as_a_vocabulary_by_chance_is_muons(size):
    assert muon_names(Draft(), {size}) == {"inner.weight"}
    assert ("inner.weight" in muon_names(Network(), {size})) == (size == 100)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trainable_parameter_is_in_exactly_one_optimizer(optimizer):
    network = Network()
    optimizers = build_optimizers(network, TrainConfig(optimizer=optimizer), {100})
    trained = [id(parameter) for parameter in optimizers.parameters]
    assert sorted(trained) == sorted(id(p) for p in network.parameters() if p.requires_grad)
    assert len(set(trained)) == len(trained)


def test_rates_follow_each_optimizers_own_peak():
    optimizers = build_optimizers(
        Network(), TrainConfig(optimizer="muon", learning_rate=1e-4, muon_learning_rate=1e-2), {100}
    )
    assert optimizers.set_rate(0.5) == pytest.approx({"muon": 5e-3, "adamw": 5e-5})
    assert optimizers.set_rate(1.0) == pytest.approx({"muon": 1e-2, "adamw": 1e-4})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_restored_goes_on_bit_by_bit(optimizer):
    config = TrainConfig(optimizer=optimizer, weight_decay=0.01)
    straight, first, second = Network(), Network(), Network()
    whole = build_optimizers(straight, config, {100})
    learn(straight, whole, 4, seed=1)
    learn(straight, whole, 3, seed=2)

    half = build_optimizers(first, config, {100})
    learn(first, half, 4, seed=1)
    saved = {name: tensor.clone() for name, tensor in half.state_tensors().items()}
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    second.load_state_dict(first.state_dict())
    rest = build_optimizers(second, config, {100})
    rest.load_state_tensors(saved)
    learn(second, rest, 3, seed=2)

    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_state_of_other_parameters_is_refused():
    optimizers = build_optimizers(Network(), TrainConfig(), {100})
    with pytest.raises(CheckpointError, match="unknown parameter"):
        optimizers.load_state_tensors({"adamw/nowhere.weight/exp_avg": torch.zeros(3)})
