"""An environment as the author of a plugin has it: what is installed here, and packages of their own beside it."""

from __future__ import annotations

import os
import site
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path


class Outsider:
    """A virtual environment layered over this one: it sees what is installed here, and installs into itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        (own,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # addsitedir, and not plain paths: packages that are editable here have .pth files of their own.
        lines = [f"import site; site.addsitedir({each!r})" for each in site.getsitepackages()]
        (own / "zz_layer.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Variables of a process of theirs."""
        changes = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", "PIP_NO_INPUT": "1"}
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes

    def run(
        self, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Python with these arguments, in a folder without any sources of ours."""
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=folder or self.folder, env=self.environment() | dict(environment or {}),
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def draftsmith(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "draftsmith", *arguments, environment=environment)

    def install(self, *packages: Path) -> None:
        """As `pip install`, with what is here already in place of an index."""
        offline = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "--disable-pip-version-check")
        done = self.run("-m", "pip", "install", *offline, *map(str, packages))
        assert done.returncode == 0, done.stdout + done.stderr

    def pytest(self, tests: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The tests of a package, as its author runs them: without the settings of this repository."""
        return self.run(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, f"--rootdir={tests}", str(tests), folder=tests
        )
