"""What can be set, and what must be captured. Torch-free."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le

from draftsmith.api import CaptureRequirements, VerifierFacts


@frozen(kw_only=True)
class ToyOptions:
    num_tokens: int = field(default=3, validator=ge(1), metadata={"help": "tokens drafted in training, one a step"})
    step_decay: float = field(
        default=0.8,
        validator=and_(gt(0.0), le(1.0)),
        metadata={"help": "weight of each step in the loss, of the one before"},
    )


def requirements(options: ToyOptions, verifier: VerifierFacts) -> CaptureRequirements:
    """The last layer's output: the cell begins with it, normed, and the teacher's logits are made of it."""
    return CaptureRequirements(layer_ids=(verifier.num_layers,))
