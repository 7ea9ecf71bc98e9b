"""What a capture will take, and what cannot be captured. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from attrs import frozen

from draftsmith.api import CaptureRequirements, VerifierFacts
from draftsmith.errors import DiskSpaceError, VerifierError
from draftsmith.interfaces import HiddenStateTransport, StateLayout
from draftsmith.plugins.results import checked

__all__ = [
    "STATISTICS_BYTES",
    "Plan",
    "check_disk",
    "check_verifier",
    "has_linear_layers",
    "human_bytes",
    "human_seconds",
]

#: Bytes that the teacher's statistics take for a token: its argmax (int32) and log-sum-exp (float32).
STATISTICS_BYTES = 8
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
#: Layers whose state runs from left to right alone, so that padding on the right changes nothing before it.
_LINEAR_LAYERS = {"linear_attention"}
#: Keys that only configurations with such layers have; published ones may leave the list of layers to their class.
_LINEAR_KEYS = ("full_attention_interval", "linear_attn_config", "linear_num_key_heads", "linear_num_value_heads")
#: Keys that only configurations with recurrent or convolutional layers have.
_RECURRENT_KEYS = (
    "attn_layer_period",
    "conv_L_cache",
    "hybrid_override_pattern",
    "mamba_d_conv",
    "mamba_d_state",
    "mamba_expand",
    "ssm_cfg",
    "ssm_state_size",
    "time_step_rank",
)


def check_verifier(facts: VerifierFacts, requirements: CaptureRequirements) -> None:
    """Whether the hidden states of this verifier can be captured as required.

    Raises:
        VerifierError: it mixes attention with recurrent layers (whose states an engine may extract wrongly), it has
            an encoder, or a layer id is beyond its layers.
    """
    where = str(facts.path)
    kinds = _foreign_layers(facts.text_config)
    if kinds:
        raise VerifierError(
            f"capture of hybrid verifiers is not supported: this one has {kinds}",
            where=where,
            hint="use a verifier whose layers are all attention, linear or not",
        )
    if facts.text_config.get("is_encoder_decoder"):
        raise VerifierError("capture needs a decoder-only verifier, and this one has an encoder", where=where)
    beyond = [each for each in requirements.ids(facts.num_layers) if each > facts.num_layers]
    if beyond or len(set(requirements.ids(facts.num_layers))) < len(requirements.ids(facts.num_layers)):
        raise VerifierError(
            f"layer ids {list(requirements.layer_ids)} do not fit a verifier of {facts.num_layers} layers",
            where=where,
            hint=f"tap distinct ids from 0 (the embedding) to {facts.num_layers} (the last layer's output)",
        )


def has_linear_layers(facts: VerifierFacts) -> bool:
    """Whether the verifier has layers of linear attention, whose states transformers captures and vLLM does not."""
    kinds = facts.text_config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        return bool(_LINEAR_LAYERS & set(map(str, kinds)))
    return any(facts.text_config.get(key) is not None for key in _LINEAR_KEYS)


def _foreign_layers(text: Mapping[str, Any]) -> str:
    kinds: set[str] = set()
    for key in ("layer_types", "layers_block_type", "block_types"):
        value = text.get(key)
        if isinstance(value, (list, tuple)):
            kinds |= {str(kind) for kind in value} - _ATTENTION_LAYERS - _LINEAR_LAYERS
    if kinds:
        return "layers of kind " + ", ".join(sorted(kinds))
    keys = [key for key in _RECURRENT_KEYS if text.get(key) is not None]
    return "the configuration keys " + ", ".join(keys) if keys else ""


@frozen(kw_only=True)
class Plan:
    """What is still to be captured.

    Attributes:
        samples, tokens: not stored yet.
        stored_samples: complete already.
        bytes: that the missing ones will take at rest, statistics included.
        peak_bytes: that they take at most on the way there.
        free: bytes that can still be stored; None where the transport cannot say.
    """

    samples: int
    tokens: int
    stored_samples: int
    bytes: int
    peak_bytes: int
    free: int | None

    @classmethod
    def of(cls, transport: HiddenStateTransport, layout: StateLayout, lengths: list[int], stored_samples: int) -> Plan:
        tokens, size, peak = sum(lengths), 0, 0
        if lengths:
            told = transport.bytes_for(layout, tokens, len(lengths))
            size = checked(transport.bytes_for, told, int, "a number of bytes") + STATISTICS_BYTES * tokens
            # The statistics are written when the states are at rest.
            told = transport.peak_bytes_for(layout, tokens, len(lengths), longest=max(lengths))
            peak = max(size, checked(transport.peak_bytes_for, told, int, "a number of bytes"))
        return cls(
            samples=len(lengths),
            tokens=tokens,
            stored_samples=stored_samples,
            bytes=size,
            peak_bytes=peak,
            free=checked(transport.free_bytes, transport.free_bytes(), (int, NoneType), "a number of bytes, or None"),
        )

    def describe(self) -> str:
        text = f"{self.samples} rows, {self.tokens} tokens, {human_bytes(self.bytes)} of hidden states"
        if human_bytes(self.peak_bytes) != human_bytes(self.bytes):
            text += f" (at most {human_bytes(self.peak_bytes)} while they are stored)"
        if self.stored_samples:
            text += f" to go ({self.stored_samples} rows are there already)"
        return text + (f"; {human_bytes(self.free)} free" if self.free is not None else "")


def check_disk(plan: Plan, where: str, *, ignore: bool) -> None:
    """Raises:
    DiskSpaceError: the states will not fit (unless *ignore*).
    """
    needed = plan.peak_bytes + plan.peak_bytes // 50
    if plan.free is not None and needed > plan.free and not ignore:
        raise DiskSpaceError(
            f"storing the hidden states will take up to {human_bytes(needed)}, and {human_bytes(plan.free)} are free",
            where=where,
            hint="use fewer rows (data.max_rows), another output folder, or capture.ignore_disk_space: true",
        )


def human_bytes(count: int) -> str:
    """Such as ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Such as ``42 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
