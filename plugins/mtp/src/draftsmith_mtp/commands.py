"""The commands that this distribution adds to ``draftsmith``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["stitch", "unstitch"]

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="folder of the model, or its name in the hub's cache")]


def stitch(
    model: _Model,
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="folder of the head: exported, or unstitched")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="folder to make")],
    copy: Annotated[bool, typer.Option("--copy", help="share no file with MODEL: copy them all")] = False,
    ignore_fingerprint: Annotated[
        bool, typer.Option("--ignore-fingerprint", help="take a head trained on other weights, if all else fits")
    ] = False,
) -> None:
    """Write a copy of MODEL with its multi-token-prediction head replaced by HEAD.

    Weight files that do not change are shared with MODEL where the file system can.
    """
    from rich.console import Console

    from draftsmith_mtp.stitch import stitch as run

    console = Console()
    done = run(model, head, target, copy=copy, ignore_fingerprint=ignore_fingerprint, console=console)
    ways = {"reflinked": done.reflinked, "hard-linked": done.linked, "copied": done.copied}
    others = "".join(f", {count} {way}" for way, count in ways.items() if count)
    converted = f" ({done.converted} converted to the model's dtype)" if done.converted else ""
    lines = [
        f"{target}: {done.tensors} tensors of the {done.family} head replaced{converted}; "
        f"weight files: {done.rewritten} rewritten{others}; "
        f"{done.bytes_written / 1e6:.1f} MB written in {done.seconds:.1f} s"
    ]
    if done.left_out:
        lines.append(f"left out: {', '.join(done.left_out)}")
    speculative = json.dumps({"method": "mtp", "num_speculative_tokens": done.speculative_tokens})
    lines.append(f"serve it: vllm serve {shlex.quote(str(target))} --speculative-config '{speculative}'")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def unstitch(
    model: _Model,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="folder to make")],
    speculative_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="tokens that vLLM drafts a round; default: the head's layers"),
    ] = None,
) -> None:
    """Write the multi-token-prediction head of MODEL into a folder of its own: config.json and model.safetensors.

    Training can begin from it, `draftsmith stitch` takes it, and vLLM serves it beside MODEL.
    """
    from rich.console import Console

    from draftsmith_mtp.stitch import unstitch as run

    console = Console()
    done = run(model, target, speculative_tokens=speculative_tokens, console=console)
    console.print(
        f"{target}: {done.tensors} tensors of the {done.family} head, "
        f"{done.bytes_written / 1e6:.1f} MB written in {done.seconds:.1f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
