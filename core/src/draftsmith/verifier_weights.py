"""The few tensors of the verifier that training needs: embedding, head, final norm. Its layers are never read.

Tensors are found by their place, not by a full name: the final norm stands beside the embedding, whatever prefix a
family (or a wrapper around the text model) puts before both. The norm is an instance of the verifier's *own* class,
since some families scale by 1 + w; it is taken from transformers' model built on the meta device.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.api import VerifierFacts
from draftsmith.errors import VerifierError
from draftsmith.interfaces import VerifierWeights
from draftsmith.verifier import weight_files

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["load_verifier_weights", "read_verifier_tensors"]

#: While transformers builds or loads a model it changes its own classes and torch's initialisers, and puts back what
#: it found: two threads at once would leave them changed for good, and weights untied that belong together.
BUILDING = threading.RLock()

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_f")
_HEADS = ("lm_head", "embed_out", "output")


def load_verifier_weights(facts: VerifierFacts, *, trust_remote_code: bool = False) -> VerifierWeights:
    """Read embedding, head and final norm of the verifier, in their stored dtype (the norm's weight in float32).

    Args:
        facts: from ``draftsmith.verifier.read_verifier``.
        trust_remote_code: run model code that comes with the verifier.

    Raises:
        VerifierError: a tensor is missing, has another shape than the configuration says, or is quantised.
    """
    files = _tensor_files(facts.path)
    embedding_name = _find_embedding(files, facts)
    embedding = _read(files, embedding_name)
    _check_shape(embedding, (facts.vocab_size, facts.hidden_size), embedding_name, facts)
    head = embedding
    head_name = _find_head(files, embedding_name)
    if head_name is not None and not facts.tie_word_embeddings:
        head = _read(files, head_name)
        _check_shape(head, (facts.vocab_size, facts.hidden_size), head_name, facts)
    return VerifierWeights(
        embed_tokens=embedding,
        lm_head=head,
        final_norm=_final_norm(facts, files, embedding_name, trust_remote_code),
        logit_softcap=facts.logit_softcap,
        logit_scale=facts.logit_scale,
    )


def read_verifier_tensors(facts: VerifierFacts, names: Iterable[str]) -> dict[str, Tensor]:
    """Further tensors of the verifier by name, in their stored dtype, for drafts that begin from some of them.

    Nothing else is read: a file is opened for its header, and a tensor's bytes alone are fetched.

    Raises:
        VerifierError: a tensor is missing, damaged or quantised.
    """
    files = _tensor_files(facts.path)
    found: dict[str, Tensor] = {}
    for name in names:
        if name not in files:
            raise VerifierError(
                f"{name} is missing", where=str(facts.path), hint="download the model again, all of its files"
            )
        found[name] = _read(files, name)
    return found


# --- tensors on disk --------------------------------------------------------------------------------------------


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name → file, from the index where there is one, else from the files' headers."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise VerifierError("the index of the weights cannot be read", where=str(index)) from error
        return {name: folder / file for name, file in weight_map.items()}
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _read(files: Mapping[str, Path], name: str) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise VerifierError(
            f"{name} cannot be read: {error}", where=str(files[name]), hint="download the model again"
        ) from error
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise VerifierError(
            f"{name} is quantised ({tensor.dtype})",
            where=str(files[name]),
            hint="use a verifier whose embedding and head are not quantised",
        )
    return tensor


def _owner(name: str) -> tuple[str, str]:
    """``a.b.norm.weight`` → (``a.b``, ``norm``)."""
    parts = name.split(".")
    return ".".join(parts[:-2]), parts[-2] if len(parts) > 1 else ""


def _candidates(files: Mapping[str, Path], last: Sequence[str]) -> list[str]:
    """Names of weights owned by one of *last*, in the order of *last*, those outside any layer and nearest first."""
    found = [
        name
        for name in files
        if name.endswith(".weight") and _owner(name)[1] in last and not any(part.isdigit() for part in name.split("."))
    ]
    return sorted(found, key=lambda name: (last.index(_owner(name)[1]), name.count("."), name))


def _find_embedding(files: Mapping[str, Path], facts: VerifierFacts) -> str:
    for name in _candidates(files, _EMBEDDINGS):
        if _find_norm(files, name) is not None:
            return name
    raise VerifierError(
        "the token embedding (with a final norm beside it) was not found",
        where=str(facts.path),
        hint="is this a decoder-only language model, with all its weight files?",
    )


def _find_norm(files: Mapping[str, Path], embedding_name: str) -> str | None:
    prefix = _owner(embedding_name)[0]
    for last in _NORMS:
        name = f"{prefix}.{last}.weight" if prefix else f"{last}.weight"
        if name in files:
            return name
    return None


def _find_head(files: Mapping[str, Path], embedding_name: str) -> str | None:
    """The head nearest to the embedding's prefix, so that a draft head inside the verifier's file is not taken."""
    prefix = embedding_name.split(".")[0]
    heads = _candidates(files, _HEADS)
    heads.sort(key=lambda name: (name.count(".") > 1 and not name.startswith(prefix), name.count(".")))
    return heads[0] if heads else None


def _check_shape(tensor: Tensor, shape: tuple[int, int], name: str, facts: VerifierFacts) -> None:
    if tuple(tensor.shape) != shape:
        raise VerifierError(
            f"{name} has shape {list(tensor.shape)}, config.json says {list(shape)}",
            where=str(facts.path),
            hint="configuration and weights belong to different models",
        )


# --- the verifier's own norm ------------------------------------------------------------------------------------


def _final_norm(
    facts: VerifierFacts, files: Mapping[str, Path], embedding_name: str, trust_remote_code: bool
) -> nn.Module:
    import torch

    name = _find_norm(files, embedding_name)
    assert name is not None  # _find_embedding chose an embedding with a norm beside it
    norm = _empty_norm(facts, _owner(name)[1], trust_remote_code).to_empty(device="cpu").float()
    prefix = name.removesuffix("weight")
    with torch.no_grad():
        for part, parameter in norm.named_parameters():
            if prefix + part not in files:
                raise VerifierError(f"{prefix + part} is missing", where=str(facts.path))
            stored = _read(files, prefix + part)
            if stored.shape != parameter.shape:
                raise VerifierError(
                    f"{prefix + part} has shape {list(stored.shape)}, its class expects {list(parameter.shape)}",
                    where=str(facts.path),
                )
            parameter.copy_(stored)
    return norm.requires_grad_(False).eval()


def _empty_norm(facts: VerifierFacts, last: str, trust_remote_code: bool) -> nn.Module:
    """The final norm's module on the meta device, from transformers' text model of this configuration."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(facts.path, local_files_only=True, **arguments)
        text = config.get_text_config()
        with BUILDING, torch.device("meta"):
            try:
                model = AutoModel.from_config(text, **arguments)
            except ValueError:  # a configuration without a bare text model of its own
                model = AutoModelForCausalLM.from_config(config, **arguments)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise VerifierError(
            f"transformers cannot build a model of type {facts.model_type!r}: {error}",
            where=str(facts.path),
            hint="install a transformers version that knows it, or set trust_remote_code where its code comes along",
        ) from error
    for _, parent in model.named_modules():
        if any(hasattr(parent, embedding) for embedding in _EMBEDDINGS):
            norm = getattr(parent, last, None)
            if isinstance(norm, torch.nn.Module):
                return norm
    raise VerifierError(
        f"the model of type {facts.model_type!r} has no {last!r} beside its embedding", where=str(facts.path)
    )
