"""Endpoints and the pool: a real tiny verifier behind them, and endpoints that fail, hang and come back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from draftsmith.api import Transport
from draftsmith.capture.address import open_transport
from draftsmith.capture.endpoints import CapturePool, EngineEndpoint
from draftsmith.capture.engines import CaptureSetup, Request
from draftsmith.capture.engines.transformers import TransformersEngine, hidden_states, load_verifier
from draftsmith.interfaces import StateLayout
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.verifier import read_verifier

TOY = Path(__file__).parent / "toy"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return read_verifier(make_tiny_verifier(tmp_path_factory.mktemp("endpoints") / "verifier", "llama"))


@pytest.fixture
def transport(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOY))
    from draftsmith_toy.plugin import draftsmith_transports

    described: Transport = draftsmith_transports()[0]
    return open_transport(described, described.options(), tmp_path / "samples")


@pytest.fixture
def layout(verifier):
    return StateLayout(
        fingerprint="0" * 32, layer_ids=(0, 1, verifier.num_layers), hidden_size=verifier.hidden_size, dtype="float32"
    )


@pytest.fixture
def make_engine(verifier, transport, layout, tmp_path):
    def make(batch_tokens=64):
        setup = CaptureSetup(
            verifier=verifier,
            layout=layout,
            dtype="float32",
            batch_tokens=batch_tokens,
            longest=64,
            work_folder=tmp_path / "work",
        )
        return TransformersEngine(setup, lambda: transport.writer(layout))

    return make


def requests(count: int, tokens: int = 12) -> list[Request]:
    draw = random.Random(7)
    return [
        Request(f"{number:032x}", [draw.randrange(5, 90) for _ in range(draw.randrange(2, tokens + 1))])
        for number in range(count)
    ]


def test_what_the_pool_captures_is_what_the_verifier_computes(make_engine, transport, layout, verifier) -> None:
    """Two engines, answers in whichever order: every row's states are its own."""
    rows = requests(24)
    lines: list[str] = []
    endpoints = [EngineEndpoint(make_engine(), name=name, slots=4) for name in ("first", "second")]
    with CapturePool(endpoints, in_flight=8, patience=10, say=lines.append) as pool:
        assert pool.capacity == 8
        answers = [future.result(60) for future in [pool.submit(row) for row in rows]]
    assert [each.sample_id for each in answers] == [row.sample_id for row in rows]
    assert all(each.refused is None and each.seconds > 0 for each in answers)
    assert not lines
    model = load_verifier(verifier.path, dtype=torch.float32, device=torch.device("cpu"))
    with transport.reader(layout) as reader:
        assert reader.complete_ids() == {row.sample_id for row in rows}
        for row in rows:
            stored = reader.get(row.sample_id, expected_tokens=len(row.token_ids))
            wanted = hidden_states(model, torch.tensor([row.token_ids]), None, layout.layer_ids)[0]
            torch.testing.assert_close(stored.hidden_states, wanted, rtol=1e-5, atol=1e-5)
    assert pool.busy_seconds > 0
    assert pool.retried == 0
