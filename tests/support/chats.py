"""Conversations for runs on tiny verifiers, whose words mean nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


def write_chats(path: Path, count: int = 30) -> None:
    """JSON lines of one question and one answer each."""
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            question, answer = (" ".join(draw.choices(_WORDS, k=words)) for words in (5, 20))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
