"""A head in a folder of its own: which of a model's tensors it holds, and its config.json. Torch-free.

Such a folder is what training exports and vLLM takes as ``{"method": "mtp", "model": FOLDER}`` beside the model that
the head belongs to. Its config.json is the model's, so that vLLM builds the head as it would from the model's own
folder; its tensors have the model's names. vLLM takes embedding and head from the model that it serves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import VerifierError
from draftsmith.interfaces import TensorSpec
from draftsmith.speculators import drafts_for
from draftsmith_mtp.families import MtpFamily

__all__ = ["ADDED_KEYS", "HEAD_KEY", "KIND", "head_config", "head_tensors", "model_config", "recorded_tensors"]

#: ``speculators_model_type`` of a head's config.json. vLLM does not look at it there.
KIND = "mtp"
#: Key of config.json with the family and the tensors of the head.
HEAD_KEY = "mtp_head"
#: What a head's config.json has and its model's has not.
ADDED_KEYS = ("speculators_model_type", "speculators_config", HEAD_KEY)
#: What of the model's config.json does not hold for a head that is written unquantised.
_QUANTISED = ("quantization_config", "compression_config")


def model_config(folder: Path) -> dict[str, Any]:
    """config.json of the model in *folder*.

    Raises:
        VerifierError: it cannot be read.
    """
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerifierError(f"cannot be read as JSON: {error}", where=str(path), hint="download it again") from error
    if not isinstance(value, dict):
        raise VerifierError("is not a JSON object", where=str(path), hint="download it again")
    return value


def head_tensors(
    family: MtpFamily, config: Mapping[str, Any], present: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Those of a model's tensors that make its head, under the model's names; copies of what it shares left out."""
    return {name: spec for name, spec in present.items() if family.own_name(name, config) is not None}


def head_config(
    config: Mapping[str, Any],
    family: MtpFamily,
    *,
    verifier_name: str,
    speculative_tokens: int,
    tensors: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """config.json of a head.

    Args:
        config: the model's.
        verifier_name: name or path of the model.
        speculative_tokens: K that it is meant to draft.
        tensors: the model's name of every tensor of the head → its shape.
        dtypes: the model's name → safetensors' name of the dtype, for those that must have a certain one.
    """
    return {
        **_unquantised(config),
        "speculators_model_type": KIND,
        "speculators_config": drafts_for(KIND, verifier_name, config.get("architectures") or (), speculative_tokens),
        HEAD_KEY: {
            "family": family.name,
            "tensors": {name: list(shape) for name, shape in sorted(tensors.items())},
            **({"dtypes": dict(sorted(dtypes.items()))} if dtypes else {}),
        },
    }


def recorded_tensors(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The tensors that a head's config.json names.

    Raises:
        KeyError, TypeError: it names none.
    """
    why, dtypes = "vLLM does not miss it, and drafts nonsense", config[HEAD_KEY].get("dtypes") or {}
    return {
        name: TensorSpec(shape=tuple(map(int, shape)), dtype=dtypes.get(name), why=why)
        for name, shape in config[HEAD_KEY]["tensors"].items()
    }


def _unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key not in _QUANTISED:
            found[key] = _unquantised(value) if key == "text_config" and isinstance(value, Mapping) else value
    return found
