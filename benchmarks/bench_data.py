"""The data that both sides of `train_step.py` train on: real conversations, a real verifier's hidden states.

Written once into a folder, in plain forms that either side can read:

    dataset/                     `datasets` on disk: input_ids, loss_mask, seq_len of the first documents
    dataset/hidden_states/       hs_<row>.safetensors: hidden_states bf16 [T, taps + 1, H], token_ids int64 [T]
    counts.safetensors           counts int64 [V]: how often each token is supervised, in all conversations

This is the layout that speculators reads; ours packs the same files with its own code.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.capture.engines.transformers import hidden_states, load_verifier
from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.template import EncodedRow, encode, load_tokenizer
from draftsmith.train.rows import assemble
from draftsmith.verifier import read_verifier

__all__ = ["ensure_data", "pack_documents", "read_counts"]

MARKER = "complete.txt"


def ensure_data(folder: Path, verifier: Path, conversations: Path, tokens: int) -> None:
    """Write *folder*, with documents of at least *tokens* tokens, unless it is there already, with as many or more."""
    sources = [str(verifier.resolve()), str(conversations.resolve())]
    marker = folder / MARKER
    if marker.exists():
        *written, count = marker.read_text().splitlines()
        if written == sources and int(count) >= tokens:
            return
    from datasets import Dataset

    rows = _encode(verifier, conversations)
    facts = read_verifier(verifier)
    counts = torch.zeros(facts.vocab_size, dtype=torch.int64)
    for row in rows:
        supervised = torch.tensor(row.token_ids)[torch.tensor(row.loss_mask)]
        counts += torch.bincount(supervised, minlength=facts.vocab_size)
    chosen, total = [], 0
    for row in rows:
        if total >= tokens:
            break
        chosen.append(row)
        total += len(row.token_ids) - 1  # one token a document is lost to the shift
    if total < tokens:
        raise SystemExit(f"{conversations} holds {total} tokens, fewer than {tokens}")
    (folder / "dataset" / "hidden_states").mkdir(parents=True, exist_ok=True)
    table = Dataset.from_dict(
        {
            "input_ids": [row.token_ids for row in chosen],
            "loss_mask": [[int(each) for each in row.loss_mask] for row in chosen],
            "seq_len": [len(row.token_ids) for row in chosen],
        }
    )
    table.set_format("torch")
    table.save_to_disk(str(folder / "dataset"))
    model = load_verifier(verifier, dtype=torch.float32, device=torch.device("cpu"))
    n = facts.num_layers
    for index, row in enumerate(chosen):
        token_ids = torch.tensor(row.token_ids)
        states = hidden_states(model, token_ids[None], None, (2, n // 2, n - 3, n))[0]
        save_file(
            {"hidden_states": states.to(torch.bfloat16).contiguous(), "token_ids": token_ids},
            folder / "dataset" / "hidden_states" / f"hs_{index}.safetensors",
        )
    save_file({"counts": counts}, folder / "counts.safetensors")
    marker.write_text("\n".join([*sources, str(tokens)]))


def _encode(verifier: Path, conversations: Path) -> list[EncodedRow]:
    tokenizer = load_tokenizer(verifier)
    rows: list[EncodedRow] = []
    for each in read_conversations([conversations.name], conversations.parent):
        if isinstance(each, Conversation):
            rows += encode(tokenizer, each.messages, each.tools, keep_cut_answers=True).rows
    return rows


def read_counts(folder: Path) -> torch.Tensor:
    """int64 [V]."""
    return load_file(folder / "counts.safetensors")["counts"]


def pack_documents(folder: Path, positions: int, lost: int):
    """One packed row whose documents give *positions* draft positions, *lost* fewer than tokens, each."""
    from datasets import load_from_disk

    from draftsmith.data.dataset import PreparedRow
    from draftsmith.interfaces import HiddenStateSample
    from draftsmith.train.rows import Document

    documents, left = [], positions
    for index, row in enumerate(load_from_disk(str(folder / "dataset")).with_format("torch")):
        if left <= 0:
            break
        stored = load_file(folder / "dataset" / "hidden_states" / f"hs_{index}.safetensors")
        length = min(left + lost, stored["token_ids"].shape[0])
        prepared = PreparedRow(
            sample_id=str(index),
            token_ids=stored["token_ids"][:length],
            loss_mask=row["loss_mask"][:length].bool(),
            source="benchmark",
        )
        sample = HiddenStateSample(
            sample_id=str(index), token_ids=prepared.token_ids, hidden_states=stored["hidden_states"][:length]
        )
        documents.append(Document(row=prepared, sample=sample))
        left -= length - lost
    return assemble(documents, capacity=positions + lost * len(documents))
