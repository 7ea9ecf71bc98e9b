"""Pages of the documentation as scripts: each fenced block is a file to write, commands to run, or what they print."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from outsider import Outsider
from packaging.requirements import Requirement

import draftsmith

_BLOCK = re.compile(r"(?:`([\w./-]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """*file*: where the text before it says that it goes, if anywhere."""

    file: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(match[1] or "", match[2], match[3])


class Reader:
    """Somebody who does what a page says, in a folder and an environment of their own."""

    def __init__(self, outsider: Outsider, folder: Path) -> None:
        self.outsider, self.folder = outsider, folder
        for tool in ("pip", "pytest", "draftsmith"):
            script = outsider.python.parent / tool
            script.write_text(f'#!/bin/sh\nexec "{outsider.python}" -m {tool} "$@"\n', encoding="utf-8")
            script.chmod(0o755)

    def follow(self, page: Path) -> int:
        """Do all of it; how many blocks there were. What a page shows as printed, in the end of a command, must be."""
        printed, todo = "", list(blocks(page))
        for block in todo:
            if block.file:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "sh":
                printed = self.run("bash", "-euo", "pipefail", "-c", block.text)
            elif block.language == "python":
                printed = self.run(str(self.outsider.python), "-c", block.text)
            elif block.language == "toml":
                requirements = map(Requirement, tomllib.loads(block.text)["dependencies"])
                assert any(each.specifier.contains(draftsmith.__version__) for each in requirements), block.text
            elif block.language == "text":
                for line in block.text.splitlines():
                    assert line.strip() in printed, f"{page.name}: {line!r} is not in\n{printed}"
            else:
                raise AssertionError(f"{page.name}: nobody runs this block of {block.language or 'no language'}")
        return len(todo)

    def run(self, *command: str) -> str:
        # pip reads PIP_NO_BUILD_ISOLATION the wrong way round.
        offline = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
        path = f"{self.outsider.python.parent}:{os.environ['PATH']}"
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False,
            env={**self.outsider.environment(), **offline, "PATH": path},
        )  # fmt: skip
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr
