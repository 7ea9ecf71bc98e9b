"""What the package registers. Draftsmith imports this module for every command, so it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen
from attrs.validators import ge

from draftsmith import api
from draftsmith.hookspecs import hookimpl


@frozen(kw_only=True)
class FocalOptions:
    gamma: float = field(
        default=2.0, validator=ge(0.0), metadata={"help": "how much less a position counts where the draft is sure"}
    )


@hookimpl
def draftsmith_losses() -> Sequence[api.Loss]:
    return [
        api.Loss(
            name="focal",
            summary="cross-entropy, weighted down where the draft is already sure (arXiv 1708.02002)",
            implementation="draftsmith_focal.losses:Focal",
            conformance="draftsmith_focal.conformance:FocalCheck",
            options=FocalOptions,
        )
    ]
