"""Both engines on the real SmolLM2, through the folder: the same tokens, the same states, layer id by layer id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftsmith.capture.address import TransportAddress, open_transport
from draftsmith.capture.engines import CaptureSetup, Done, Request
from draftsmith.capture.engines.transformers import TransformersEngine
from draftsmith.capture.engines.vllm import VllmEngine
from draftsmith.errors import ServingError
from draftsmith.interfaces import HiddenStateReader, StateLayout
from draftsmith.verifier import read_verifier
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.plugin import draftsmith_transports

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow]

#: Shorter and longer than a forward pass (so that prompts are cut into chunks), and than a cache block.
LENGTHS = (3, 17, 64, 190, 90, 1, 16, 32, 33)
BATCH_TOKENS = 128


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    return [
        Request(f"{number:032x}", torch.randint(5, 40000, (length,), generator=generator).tolist())
        for number, length in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def setup(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CaptureSetup:
    facts = read_verifier(smollm2_path)
    layout = StateLayout(
        fingerprint="f" * 32,
        layer_ids=tuple(range(facts.num_layers + 1)),
        hidden_size=facts.hidden_size,
        dtype="bfloat16",
    )
    return CaptureSetup(
        verifier=facts,
        layout=layout,
        dtype="float32",
        batch_tokens=BATCH_TOKENS,
        longest=max(LENGTHS),
        work_folder=tmp_path_factory.mktemp("work"),
    )


def address(setup: CaptureSetup, location: Path) -> TransportAddress:
    return TransportAddress.of(draftsmith_transports()[0], FileOptions(), location, setup.layout)


@pytest.fixture(scope="module")
def readers(
    setup: CaptureSetup, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[HiddenStateReader, list[Done]]]]:
    """What each engine stored."""
    root = tmp_path_factory.mktemp("states")
    found = {}
    for name in ("transformers", "vllm"):
        transport = open_transport(draftsmith_transports()[0], FileOptions(), root / name)
        engine = (
            VllmEngine(setup, address(setup, root / name))
            if name == "vllm"
            else TransformersEngine(setup, lambda transport=transport: transport.writer(setup.layout))
        )
        with engine:
            assert engine.compute_dtype == "float32"
            done = [*engine.capture(requests()[:6]), *engine.capture(requests()[6:])]
        found[name] = (transport.reader(setup.layout), done)
    yield found
    for reader, _ in found.values():
        reader.close()


def test_every_row_is_stored_with_its_own_tokens(readers) -> None:
    for reader, done in readers.values():
        assert sorted(each for part in done for each in part.stored) == [each.sample_id for each in requests()]
        assert sum(part.tokens for part in done) == sum(LENGTHS)
        assert not any(part.refused for part in done)
        for request in requests():
            sample = reader.get(request.sample_id, expected_tokens=len(request.token_ids))
            assert sample.token_ids.tolist() == request.token_ids


def test_both_engines_agree_on_every_layer_id(readers, setup: CaptureSetup) -> None:
    """float32 inside, bf16 at rest: a value may round to a neighbour (2**-8 of it), no more."""
    for request in requests():
        ours = readers["transformers"][0].get(request.sample_id).hidden_states.float()
        theirs = readers["vllm"][0].get(request.sample_id).hidden_states.float()
        for place, layer_id in enumerate(setup.layout.layer_ids):
            a, b = ours[:, place], theirs[:, place]
            scale = a.norm(dim=-1, keepdim=True) / a.shape[-1] ** 0.5
            assert float(((a - b).abs() / (a.abs() + scale)).max()) < 2**-7, (layer_id, request.sample_id)
            assert float((a - b).norm() / a.norm()) < 2e-3, (layer_id, request.sample_id)


def test_a_verifier_that_vllm_cannot_load_says_why(setup: CaptureSetup, tmp_path: Path) -> None:
    import attrs

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no-such-model", "architectures": ["Nothing"]}')
    broken = attrs.evolve(
        setup, verifier=attrs.evolve(setup.verifier, path=tmp_path / "model"), work_folder=tmp_path / "work"
    )
    with pytest.raises(ServingError, match="vLLM failed during capture") as caught:
        VllmEngine(broken, address(setup, tmp_path / "states")).__enter__()
    assert caught.value.where == str(tmp_path / "work" / "vllm.log")
    assert not list((tmp_path / "work").glob("reports-*"))
