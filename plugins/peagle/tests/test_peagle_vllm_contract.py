"""The exported configuration through vLLM's own reader, tensors through its own loader, and what it makes of masks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoint.card import speculative_config
from draftsmith.checkpoint.export import write_export
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import ExportContext, TensorSpec
from draftsmith.testing.algorithm import Material, make_material, tiny_case

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SMALL: dict[str, Any] = {"num_depths": 4, "num_layers": 2}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": False, "train_mask_embedding": False},
        {"layer_type": "qwen3", "sliding_window": 16, "layer_ids": (1, 2, 4, 6, 7), "mask_token_id": 9},
    ],
)
def test_vllm_reads_what_was_trained(material: Material, options: dict[str, Any]) -> None:
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    case = tiny_case(material, "peagle", options={**SMALL, **options}, draft_size=64)
    setup = case.algorithm.setup
    config = case.format.config(ExportContext(setup=setup, verifier_name="some/verifier", speculative_tokens=4))
    speculative = SpeculatorsConfig.extract_vllm_speculative_config(copy.deepcopy(config))
    plan = case.format.serving(config)
    # As the model vLLM tells itself what has to be said of a draft beside its verifier.
    beside = speculative_config(plan, "some/folder")
    assert {**speculative, "model": "some/folder"} == beside
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 4, "parallel_drafting": True}
    draft = SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(config)))
    assert draft.norm_before_residual is setup.options.norm_before_residual
    assert draft.norm_before_fc is setup.options.norm_before_fc
    assert not hasattr(draft, "fc_norm"), "it is forwarded now: options.py need not refuse it any more"
    assert not hasattr(draft, "norm_output")
    assert draft.pard_token == config["mask_token_id"] == (setup.options.mask_token_id or 312)
    kind = {"llama": "PeagleLlamaForCausalLM", "qwen3": "PeagleQwen3ForCausalLM"}[setup.options.layer_type]
    assert draft.architectures == [kind]
    assert tuple(draft.eagle_aux_hidden_state_layer_ids) == setup.capture.layer_ids
    assert draft.num_aux_hidden_states == len(setup.capture.layer_ids)
    assert (draft.draft_vocab_size, draft.vocab_size) == (64, setup.verifier.vocab_size)
    assert (draft.head_dim, draft.num_hidden_layers) == (setup.verifier.head_dim, 2)
    if setup.options.sliding_window is not None:
        assert draft.layer_types == ["sliding_attention"] * 2
        assert draft.sliding_window == setup.options.sliding_window


# --- tensors ----------------------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no norm": {"norm_before_fc": False},
    "qwen3": {"layer_type": "qwen3"},
}


class Loader:
    """vLLM's draft class, built as for serving, and the same draft of ours."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import get_model_architecture

        material = make_material(folder / "verifier", "llama")
        self.case = tiny_case(material, "peagle", options={**SMALL, **options}, draft_size=64)
        context = ExportContext(
            setup=self.case.algorithm.setup, verifier_name=str(material.facts.path), speculative_tokens=4
        )
        self.model = self.case.algorithm.build_model()
        self.config, _ = write_export(folder / "checkpoint", self.case.format, self.model, context, {})
        self.tensors: Tensors = self.case.format.tensors(self.model, context)
        arguments = EngineArgs(
            model=str(material.facts.path),
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            speculative_config=speculative_config(self.case.format.serving(self.config), str(folder / "checkpoint")),
        )
        engine = arguments.create_engine_config()
        with set_current_vllm_config(engine):
            init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
            kind, _ = get_model_architecture(engine.speculative_config.draft_model_config)
            self.theirs = kind(vllm_config=engine)

    def load_theirs(self, tensors: Tensors) -> bool:
        try:
            self.theirs.load_weights(tensors.items())
        except ValueError:
            return False
        return True

    def load_ours(self, tensors: Tensors) -> bool:
        try:
            self.case.format.load(self.case.algorithm.build_model(), tensors, self.config)
        except CheckpointError:
            return False
        return True

    def passes_lint(self, tensors: Tensors) -> bool:
        """As far as names are concerned: none that is unknown, none of those missing that vLLM asks for."""
        present = {name: TensorSpec(shape=tuple(each.shape)) for name, each in tensors.items()}
        as_loaded = self.case.format.as_loaded(self.config, present)
        expected = self.case.format.expected_tensors(self.config)
        missing = {name for name, spec in expected.items() if spec.required} - as_loaded.keys()
        return not (as_loaded.keys() - expected.keys()) and "mask_hidden" not in missing


@pytest.fixture(scope="module", params=FLAGS)
def loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
            patch.setenv(name, "1")
        yield Loader(tmp_path_factory.mktemp("loader"), FLAGS[request.param])
        cleanup_dist_env_and_memory()


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {new if name == old else name: each for name, each in tensors.items()}


def without(dropped: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if name != dropped}


CHANGES: dict[str, tuple[Callable[[Tensors], Tensors], bool]] = {
    "as written": (lambda tensors: tensors, True),
    "no mask_hidden": (without("mask_hidden"), False),
    "mask_hidden with a prefix": (renamed("mask_hidden", "model.mask_hidden"), True),
    "midlayer": (lambda tensors: {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}, True),
    "norm of a tap": (lambda tensors: {**tensors, "fc_norm.0.weight": torch.ones(64)}, False),
    "something else": (lambda tensors: {**tensors, "projector.weight": torch.ones(3)}, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_lint_loading_and_vllm_agree_on_every_name(loader: Loader, change: str) -> None:
    alter, taken = CHANGES[change]
    tensors = alter(dict(loader.tensors))
    assert loader.load_theirs(tensors) is taken
    assert loader.load_ours(tensors) is taken, "loading and vLLM"
    assert loader.passes_lint(tensors) is taken, "lint and vLLM"


def test_a_mask_row_reads_in_vllm_what_it_was_trained_to_read(loader: Loader) -> None:
    """The embedding that vLLM looks up for the mask token, and the hidden state that it puts beside it."""
    assert loader.load_theirs(dict(loader.tensors))
    theirs, ours = loader.theirs, loader.model
    token = loader.config["mask_token_id"]
    with torch.no_grad():
        torch.testing.assert_close(theirs.embed_input_ids(torch.tensor([token])), ours.mask_row())  # type: ignore[operator]
        hidden = theirs.combine_hidden_states(theirs.mask_hidden.view(-1))
        torch.testing.assert_close(hidden[None], ours.fuse(ours.get_parameter("mask_hidden")[0]), rtol=1e-4, atol=1e-5)  # type: ignore[operator]
