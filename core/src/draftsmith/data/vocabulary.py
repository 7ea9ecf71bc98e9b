"""The draft's reduced vocabulary: which target tokens it can propose, and its files.

Convention of vLLM: ``target_id = draft_id + d2t[draft_id]``; ``nonzero(t2d) == arange(V_d) + d2t``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import DataError
from draftsmith.interfaces import VocabularyMap
from draftsmith.stages import write_tensors_atomically

__all__ = ["build_vocabulary", "coverage", "load_occurring", "load_vocabulary", "save_vocabulary"]


def build_vocabulary(counts: Tensor, draft_size: int | None = None) -> VocabularyMap:
    """Keep the *draft_size* most frequent supervised tokens.

    Ties go to the lower id, and so do the places left where fewer distinct tokens occur.

    Args:
        counts: int64 [V_t], how often each target token is supervised in the training rows.
        draft_size: V_d; None keeps all, which makes the map the identity.

    Raises:
        DataError: *draft_size* is below 1 or larger than the verifier's vocabulary.
    """
    target_size = counts.shape[0]
    size = target_size if draft_size is None else draft_size
    if not 1 <= size <= target_size:
        raise DataError(
            f"a draft vocabulary of {size} cannot be taken from the verifier's {target_size} tokens",
            where="vocabulary.draft_size",
            hint=f"choose at most {target_size}, or null for all",
        )
    # A stable descending sort keeps equal counts in ascending id, unused tokens (count 0) among them.
    kept = torch.sort(counts, descending=True, stable=True).indices[:size].sort().values
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[kept] = True
    return VocabularyMap(d2t=kept - torch.arange(size), t2d=t2d)


def coverage(vocabulary: VocabularyMap, counts: Tensor) -> float:
    """Share of the counted tokens that the draft can propose (1.0 where nothing was counted)."""
    total = int(counts.sum())
    return int(counts[vocabulary.t2d].sum()) / total if total else 1.0


def save_vocabulary(path: Path, vocabulary: VocabularyMap, counts: Tensor, occurs: Tensor) -> None:
    """Write ``d2t``, ``t2d``, ``counts`` and ``occurs`` as safetensors, atomically.

    Args:
        counts: int64 [V_t], see :func:`build_vocabulary`.
        occurs: bool [V_t], True for the tokens that occur in any row, supervised or not.

    Raises:
        DiskSpaceError, OutputError: it cannot be written; what was there is as it was.
    """
    tensors = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d, "counts": counts, "occurs": occurs}
    write_tensors_atomically(path, tensors)


def load_vocabulary(path: Path) -> VocabularyMap:
    """Read what :func:`save_vocabulary` wrote, and check that d2t and t2d say the same.

    Raises:
        DataError: missing, damaged, or contradicting itself.
    """
    stored = _stored(path)
    vocabulary = VocabularyMap(d2t=stored["d2t"], t2d=stored["t2d"])
    if not torch.equal(vocabulary.kept_ids(), vocabulary.t2d.nonzero().flatten()):
        raise DataError("d2t and t2d contradict each other", where=str(path), hint=_hint(path))
    return vocabulary


def load_occurring(path: Path) -> frozenset[int]:
    """The tokens that occur in any prepared row.

    Raises:
        DataError: missing or damaged.
    """
    return frozenset(_stored(path)["occurs"].nonzero().flatten().tolist())


def _stored(path: Path) -> dict[str, Tensor]:
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"the vocabulary map cannot be read: {error}", where=str(path), hint=_hint(path)) from error
    missing = [name for name in ("d2t", "t2d", "occurs") if name not in stored]
    if missing:
        what = f"the vocabulary map cannot be read: it lacks {', '.join(missing)}"
        raise DataError(what, where=str(path), hint=_hint(path))
    return stored


def _hint(path: Path) -> str:
    return f"remove {path.parent}, and run `draftsmith prepare` again: it makes the same map"
