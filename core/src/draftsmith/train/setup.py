"""From a resolved run to the objects that train: algorithm, draft, loss. Export and verify build with it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import frozen
from torch import nn

from draftsmith import api
from draftsmith.config.structure import Structurer
from draftsmith.errors import ConfigError, PluginError
from draftsmith.interfaces import (
    AlgorithmSetup,
    DraftAlgorithm,
    DraftArchitecture,
    MaskRule,
    PositionLoss,
    VerifierWeights,
    VocabularyMap,
)
from draftsmith.plugins import Catalog, load_reference
from draftsmith.plugins.results import check_draft, check_items, check_window, wrong_result

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["ParameterCount", "build_algorithm", "build_draft", "build_loss", "build_mask", "count_parameters"]


@frozen(kw_only=True)
class ParameterCount:
    """Parameters of a draft, in elements."""

    trainable: int
    frozen: int

    def __str__(self) -> str:
        total = self.trainable + self.frozen
        return (
            f"{self.trainable / 1e6:.2f} M of {total / 1e6:.2f} M parameters are trained "
            f"({self.trainable / max(total, 1):.0%}); the rest is the verifier's, frozen"
        )


def build_algorithm(
    run: ResolvedRun,
    vocabulary: VocabularyMap,
    weights: VerifierWeights,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
) -> DraftAlgorithm:
    """The run's algorithm, built from its facets.

    Args:
        vocabulary: the draft's.
        weights: the verifier's tensors; moved to *device*, so that the teacher shares them with the setup.

    Raises:
        PluginError: an implementation does not import, or is not what its registration says.
    """
    setup = AlgorithmSetup(
        options=run.algorithm_options,
        verifier=run.verifier,
        weights=_on_device(weights, device),
        vocabulary=attrs.evolve(vocabulary, d2t=vocabulary.d2t.to(device), t2d=vocabulary.t2d.to(device)),
        capture=run.requirements,
        mask=build_mask(run),
        architecture=load_reference(run.architecture.implementation, expected=DraftArchitecture),
        attention=run.recipe.train.attention,
        compute_dtype=compute_dtype,
    )
    implementation = load_reference(run.algorithm.implementation, expected=DraftAlgorithm)
    algorithm: DraftAlgorithm = implementation(setup)
    return algorithm


def build_mask(run: ResolvedRun, item: api.Mask | None = None) -> MaskRule:
    """The run's mask rule, or that of *item*, with the window that the algorithm's options ask for."""
    implementation = load_reference((item or run.mask).implementation, expected=MaskRule)
    mask: MaskRule = implementation(window=check_window(run.algorithm, run.algorithm_options))
    return mask


def build_loss(catalog: Catalog[api.Loss], name: str, options: Mapping[str, Any] | None = None) -> PositionLoss:
    """The loss called *name*, and those that it is made of.

    Args:
        catalog: the registered losses.
        options: plain values, as in a recipe; what is left out has its default.

    Raises:
        UnknownNameError, PluginError: it, or one that it is made of, is not there or cannot be loaded.
        ConfigError: an option is wrong.
    """
    item = catalog.get(name)
    implementation = load_reference(item.implementation, expected=PositionLoss)
    if item.options is None:
        bare: PositionLoss = implementation(**(options or {}))
        return bare
    structurer = Structurer(lambda key: f"options of the loss {name!r}: {key}")
    chosen = structurer.build(item.options, options or {})
    if structurer.problems:
        raise ConfigError(structurer.problems)
    arguments = {each.name: getattr(chosen, each.name) for each in attrs.fields(item.options)}
    parts = [
        build_loss(catalog, part.name, part.options)
        for part in check_items(item.parts, item.parts(chosen), api.LossPart)
    ]
    loss: PositionLoss = implementation(**arguments, parts=parts) if parts else implementation(**arguments)
    return loss


def build_draft(algorithm: DraftAlgorithm, device: torch.device, seed: int) -> nn.Module:
    """A fresh draft on *device*, initialised from *seed*; leaves torch's global generator seeded with it.

    Raises:
        PluginError: the draft is no draft architecture, has nothing to train, or would train the verifier's tensors.
    """
    torch.manual_seed(seed)
    model = check_draft(algorithm, algorithm.build_model())
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise wrong_result(algorithm.build_model, model, "a draft with a trainable parameter")
    shared = trainable & set(model.shared_tensors())  # type: ignore[operator]  # a DraftArchitecture
    if shared:
        raise PluginError(
            f"{type(model).__name__} would train what it shares with the verifier: {', '.join(sorted(shared))}",
            hint="freeze them (requires_grad False), or do not declare them shared",
        )
    return model.to(device)


def count_parameters(model: nn.Module) -> ParameterCount:
    """Trainable and frozen elements; buffers count as neither."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return ParameterCount(
        trainable=sum(size for size, trained in sizes if trained),
        frozen=sum(size for size, trained in sizes if not trained),
    )


def _on_device(weights: VerifierWeights, device: torch.device) -> VerifierWeights:
    embed_tokens = weights.embed_tokens.to(device)
    # Tied tensors stay one tensor.
    tied = weights.lm_head.data_ptr() == weights.embed_tokens.data_ptr()
    return attrs.evolve(
        weights,
        embed_tokens=embed_tokens,
        lm_head=embed_tokens if tied else weights.lm_head.to(device),
        final_norm=weights.final_norm.to(device),
    )
