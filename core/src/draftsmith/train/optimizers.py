"""AdamW and Muon (torch's own), which parameter goes to which, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from draftsmith.config.schema import TrainConfig
from draftsmith.errors import CheckpointError
from draftsmith.interfaces import DraftArchitecture

__all__ = ["Optimizers", "build_optimizers", "muon_names"]


class Optimizers:
    """One or two torch optimisers over disjoint parameters, driven as one.

    Args:
        parts: name → optimiser; the peak learning rate is each one's ``lr`` at construction.
        names: parameter → its name in the model; keys of the saved state.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer], names: Mapping[Tensor, str]) -> None:
        self.parts = dict(parts)
        self._names = dict(names)
        self._peak = {key: float(part.defaults["lr"]) for key, part in self.parts.items()}

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that are trained, in a fixed order."""
        return [p for part in self.parts.values() for group in part.param_groups for p in group["params"]]

    def set_rate(self, factor: float) -> dict[str, float]:
        """Set every learning rate to *factor* times its peak; returns them by optimiser."""
        for key, part in self.parts.items():
            for group in part.param_groups:
                group["lr"] = self._peak[key] * factor
        return {key: peak * factor for key, peak in self._peak.items()}

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """``optimiser/parameter/key`` → tensor: the whole state (moments and step counters, all float32)."""
        return dict(self._state())

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for key, part in self.parts.items():
            for parameter, state in part.state.items():
                for name, value in state.items():
                    if not isinstance(value, Tensor):
                        raise TypeError(f"{key} keeps {name} as {type(value).__name__}; only tensors are saved")
                    yield f"{key}/{self._names[parameter]}/{name}", value

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state_tensors`.

        Raises:
            CheckpointError: the state belongs to other parameters or another optimiser.
        """
        by_name = {name: parameter for parameter, name in self._names.items()}
        for part in self.parts.values():
            part.state.clear()
        for key, value in tensors.items():
            optimizer, _, rest = key.partition("/")
            name, _, field = rest.rpartition("/")
            parameter = by_name.get(name)
            if optimizer not in self.parts or parameter is None:
                raise CheckpointError(f"optimiser state of an unknown parameter: {key}")
            # Moments live with their parameter; a step counter stays on the CPU unless the optimiser is fused there.
            device = parameter.device if value.dim() or parameter.device.type != "cpu" else value.device
            self.parts[optimizer].state[parameter][field] = value.to(device).clone()


def muon_names(model: nn.Module, vocabulary_sizes: Collection[int]) -> frozenset[str]:
    """Names of the trainable matrices that Muon takes; AdamW takes the rest.

    Muon orthogonalises the update of a map between hidden spaces. Vectors (norms, biases, maps to a single number),
    lookup tables and matrices with a vocabulary on one side (heads, embeddings, low-rank token tables) are no such
    maps. Which ones have a vocabulary, the architecture says, or else their shape.
    """
    tables = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    by_token = model.vocabulary_tensors() if isinstance(model, DraftArchitecture) else None
    sizes = set(vocabulary_sizes) if by_token is None else set()
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dim() == 2
        and 1 not in parameter.shape
        and id(parameter) not in tables
        and name not in (by_token or ())
        and not sizes.intersection(parameter.shape)
    )


def build_optimizers(model: nn.Module, config: TrainConfig, vocabulary_sizes: Collection[int]) -> Optimizers:
    """The optimisers that *config* asks for, over the trainable parameters of *model*.

    Muon's update is rescaled to the root mean square that AdamW's has (``match_rms_adamw``), so that its learning
    rates are of the same kind.
    """
    chosen = muon_names(model, vocabulary_sizes) if config.optimizer == "muon" else frozenset()
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in trainable if name in chosen]
    rest = [parameter for name, parameter in trainable if name not in chosen]
    parts: dict[str, torch.optim.Optimizer] = {}
    if matrices:
        parts["muon"] = torch.optim.Muon(
            matrices,
            lr=config.muon_learning_rate,
            weight_decay=config.muon_weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
    if rest:
        parts["adamw"] = torch.optim.AdamW(
            rest, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
    return Optimizers(parts, {parameter: name for name, parameter in trainable})
