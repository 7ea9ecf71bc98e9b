"""Each distribution builds a wheel that works without any sources, on what it declares and nothing else."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

import draftsmith

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [ROOT / "core", *sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))
CORE_DEPENDENCIES = {"pluggy", "attrs", "cattrs", "importlib-metadata", "safetensors", "pyyaml", "typer", "rich"}


def project(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- metadata ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [ROOT, *PACKAGES], ids=lambda path: path.name)
def test_every_version_is_the_same(folder: Path) -> None:
    assert project(folder)["version"] == draftsmith.__version__
    for requirement in map(Requirement, project(folder).get("dependencies", [])):
        if normalised(requirement.name).startswith("draftsmith"):
            assert str(requirement.specifier) == f"=={draftsmith.__version__}"


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_a_version_written_in_source_is_the_same(folder: Path) -> None:
    for path in sorted((folder / "src").glob("*/__init__.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
                assert ast.literal_eval(node.value) == draftsmith.__version__, path


def test_changelog_has_the_version() -> None:
    assert f"## [{draftsmith.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_core_keeps_its_hard_dependencies_few() -> None:
    assert {normalised(Requirement(each).name) for each in project(ROOT / "core")["dependencies"]} == CORE_DEPENDENCIES


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_vllm_is_never_a_dependency(folder: Path) -> None:
    optional = project(folder).get("optional-dependencies", {})
    every = [*project(folder)["dependencies"], *(each for extra in optional.values() for each in extra)]
    assert not [each for each in every if normalised(Requirement(each).name).startswith("vllm")]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_the_workspace_knows_the_package(folder: Path) -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    relative = folder.relative_to(ROOT).as_posix()
    assert workspace["tool"]["uv"]["sources"][project(folder)["name"]] == {"workspace": True}
    assert f"{relative}/src" in workspace["tool"]["mypy"]["files"]
    assert f"{relative}/tests" in workspace["tool"]["pytest"]["ini_options"]["testpaths"]
    assert re.search(rf"^-e \./{relative}(\[[a-z,]+\])?$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_the_licence_travels_with_the_package(folder: Path) -> None:
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert project(folder)["license"] == "Apache-2.0"


def imported_packages(folder: Path) -> set[str]:
    """Distributions of ours whose modules the sources of *folder* import, itself left out."""
    names: set[str] = set()
    for path in (folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module or "")
    found = {normalised(name.partition(".")[0]) for name in names}
    return {name for name in found if name.startswith("draftsmith")} - {project(folder)["name"]}


@pytest.mark.parametrize("folder", [*PACKAGES, *EXAMPLES], ids=lambda path: path.name)
def test_no_package_imports_a_sibling_that_it_does_not_depend_on(folder: Path) -> None:
    declared = {normalised(Requirement(each).name) for each in project(folder)["dependencies"]}
    assert imported_packages(folder) <= declared


# --- wheels ------------------------------------------------------------------------------------------------------


class Wheel(NamedTuple):
    """A built wheel, and the modules that its source had."""

    path: Path
    modules: frozenset[str]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Distribution name → its wheel, of what this repository publishes."""
    return build_wheels(PACKAGES, tmp_path_factory)


@pytest.fixture(scope="module")
def all_wheels(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Wheel]) -> dict[str, Wheel]:
    """Those, and those of the example plugins."""
    return wheels | build_wheels(EXAMPLES, tmp_path_factory)


def build_wheels(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Distribution name → its wheel, built from a copy of the sources that is gone before anything is installed."""
    output = tmp_path_factory.mktemp("wheels")
    sources = tmp_path_factory.mktemp("sources")
    built = {}
    for folder in folders:
        copy = sources / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "dist", "build"))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output), str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        name, version = project(folder)["name"], project(folder)["version"]
        (path,) = output.glob(f"{name.replace('-', '_')}-{version}-py3-none-any.whl")
        modules = (module.relative_to(copy / "src").as_posix() for module in (copy / "src").rglob("*.py"))
        built[name] = Wheel(path, frozenset(modules))
    shutil.rmtree(sources)
    return built


def declared_closure(*asked: str) -> set[str]:
    """The distributions that these requirements need according to metadata, their extras included."""
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(each) for each in asked]
    while waiting:
        requirement = waiting.pop()
        name = normalised(requirement.name)
        for extra in {"", *requirement.extras} - {extra for each, extra in seen if each == name}:
            seen.add((name, extra))
            needed = map(Requirement, importlib.metadata.distribution(name).requires or [])
            waiting += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


class FreshEnvironment:
    """A virtual environment with the core's declared dependencies, copied from this one, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.site,) = (folder / "lib").glob("python*/site-packages")
        for name in sorted(declared_closure("draftsmith") - {"draftsmith"}):
            self.copy_distribution(name)

    def copy_distribution(self, name: str) -> None:
        for file in importlib.metadata.distribution(name).files or []:
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.exists():
                target = self.site / Path(*file.parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def install(self, *wheels: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--no-deps",
            "--no-index",
            "-q",
        ]
        done = subprocess.run([*command, *map(str, wheels)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *arguments: str, also: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        """`draftsmith …` from a folder without sources, untouched by this process's own environment.

        Args:
            also: folders whose packages are installed as well.
        """
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "COLUMNS": "200", "NO_COLOR": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, also)), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [str(self.folder / "bin" / "draftsmith"), *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Wheel]) -> FreshEnvironment:
    environment = FreshEnvironment(tmp_path_factory.mktemp("core"))
    environment.install(wheels["draftsmith"].path)
    return environment


def lend(requirements: Sequence[str], folder: Path) -> Path:
    """*folder*, with links to what these need here beyond the core's own needs: torch is too large to be copied."""
    folder.mkdir()
    for name in declared_closure(*requirements) - declared_closure("draftsmith"):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / top).is_symlink():  # packages of one namespace share a folder
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


@pytest.fixture(scope="module")
def with_plugins(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Wheel]) -> FreshEnvironment:
    environment = FreshEnvironment(tmp_path_factory.mktemp("plugins"))
    environment.install(*(wheel.path for wheel in wheels.values()))
    return environment


@pytest.mark.slow
def test_wheels_hold_the_package_and_nothing_else(wheels: dict[str, Wheel]) -> None:
    for name, wheel in wheels.items():
        package = name.replace("-", "_")
        with zipfile.ZipFile(wheel.path) as archive:
            names = archive.namelist()
        assert f"{package}/py.typed" in names
        assert any(each.endswith(".dist-info/licenses/LICENSE") for each in names)
        outside = [each for each in names if not each.startswith((f"{package}/", f"{package}-"))]
        assert not outside, outside
        assert not [each for each in names if "/tests/" in each]


@pytest.mark.slow
def test_the_cores_wheel_holds_the_templates(wheels: dict[str, Wheel]) -> None:
    templates = [path for path in (ROOT / "core" / "src" / "draftsmith" / "templates").rglob("*") if path.is_file()]
    with zipfile.ZipFile(wheels["draftsmith"].path) as archive:
        held = {name for name in archive.namelist() if name.startswith("draftsmith/templates/")}
    assert held == {path.relative_to(ROOT / "core" / "src").as_posix() for path in templates}
    assert len(held) > 20


@pytest.mark.slow
def test_wheels_hold_every_module(wheels: dict[str, Wheel]) -> None:
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel.path) as archive:
            assert wheel.modules <= set(archive.namelist())


@pytest.mark.slow
def test_core_alone_works(core_alone: FreshEnvironment) -> None:
    helped = core_alone.run("--help")
    assert helped.returncode == 0, helped.stderr
    assert "draftsmith" in helped.stdout
    listed = core_alone.run("plugins", "list")
    assert listed.returncode == 0, listed.stderr
    assert "builtin" in listed.stdout
    assert "eagle3" not in listed.stdout


@pytest.mark.slow
def test_core_alone_says_what_its_kit_needs(core_alone: FreshEnvironment) -> None:
    checked = core_alone.run("plugins", "check", "ce")
    assert checked.returncode == 2, checked.stdout + checked.stderr
    assert "the conformance kit needs torch and transformers and pytest, which are not installed" in checked.stderr
    assert "pip install 'draftsmith[train,test]'" in checked.stderr
    assert "Traceback" not in checked.stderr


@pytest.mark.slow
def test_core_alone_has_a_doctor_that_says_what_is_missing(core_alone: FreshEnvironment) -> None:
    looked = core_alone.run("doctor")
    assert looked.returncode == 1, looked.stdout + looked.stderr
    assert "torch:       is not installed: recipes can be checked, and no more" in looked.stdout
    assert "pip install 'draftsmith[train]'" in looked.stdout
    assert "Traceback" not in looked.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["prepare", "capture", "train", "export", "verify", "run"])
def test_without_torch_each_stage_says_what_to_install(
    command: str, with_plugins: FreshEnvironment, tiny_verifier: Path
) -> None:
    recipe = with_plugins.folder / "recipe.yaml"
    (with_plugins.folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    recipe.write_text(
        f"{{verifier: {tiny_verifier}, output: out, algorithm: eagle3, transport: hs_file, "
        "data: {sources: [chats.jsonl]}, capture: {engine: transformers}}"
    )
    done = with_plugins.run(command, str(recipe))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "pip install 'draftsmith[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def unpack(name: str, wheels: dict[str, Wheel], folder: Path) -> None:
    """The wheel of *name* and of those of ours that it depends on, as pip would lay them out, less the core's."""
    with zipfile.ZipFile(wheels[name].path) as archive:
        (metadata,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        archive.extractall(folder)
    needed = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    for requirement in needed:
        if requirement.marker is None and requirement.name in wheels and requirement.name != "draftsmith":
            unpack(requirement.name, wheels, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [project(folder)["name"] for folder in [*PACKAGES[1:], *EXAMPLES]])
def test_each_plugin_works_alone_beside_the_core(
    name: str, core_alone: FreshEnvironment, all_wheels: dict[str, Wheel], tmp_path: Path
) -> None:
    """It is listed, helps and shows its options, without torch and without the plugins that it does not depend on."""
    unpack(name, all_wheels, tmp_path)
    listed = core_alone.run("plugins", "list", also=[tmp_path])
    assert f"  ({name} " in listed.stdout, listed.stdout + listed.stderr
    assert "quarantined" not in listed.stdout
    assert "warning:" not in listed.stdout
    for command in (["--help"], ["plugins", "show", name]):
        done = core_alone.run(*command, also=[tmp_path])
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"plugin {name.removeprefix('draftsmith-').replace('-', '_')}  (" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*PACKAGES[1:], *EXAMPLES], ids=lambda path: path.name)
def test_each_plugin_passes_the_kit_alone_beside_the_core(
    folder: Path, core_alone: FreshEnvironment, all_wheels: dict[str, Wheel], tmp_path: Path
) -> None:
    """With what it and the kit declare, and none of the plugins that it does not depend on."""
    name = project(folder)["name"]
    unpack(name, all_wheels, tmp_path)
    # Of the builds of a store, that which is installed.
    offered = [each for extra in project(folder).get("optional-dependencies", {}).values() for each in extra]
    builds = [each for each in offered if installed(each)]
    lent = lend(["draftsmith[train,test]", *builds], tmp_path / "lent")
    checked = core_alone.run("plugins", "check", name, also=[tmp_path, lent])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"plugin {name.removeprefix('draftsmith-').replace('-', '_')}  ({name} " in checked.stdout
    assert ", 0 failed, in " in checked.stdout
    assert "skipped" not in checked.stdout


def installed(requirement: str) -> bool:
    """Whether a distribution of that name is here."""
    try:
        return bool(importlib.metadata.distribution(Requirement(requirement).name))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
def test_core_alone_names_the_distributions_that_are_missing(core_alone: FreshEnvironment) -> None:
    recipe = core_alone.folder / "recipe.yaml"
    recipe.write_text("{verifier: nowhere, output: runs/x, algorithm: eagle3, transport: hs_file}\n")
    checked = core_alone.run("run", str(recipe), "--check")
    said = checked.stdout + checked.stderr
    assert checked.returncode == 2, said
    assert "pip install draftsmith-eagle3" in said
    assert "pip install draftsmith-hs-file" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_installed_plugins_are_found(with_plugins: FreshEnvironment) -> None:
    listed = with_plugins.run("plugins", "list")
    assert listed.returncode == 0, listed.stderr
    for distribution in ("draftsmith-eagle3", "draftsmith-hs-file"):
        assert distribution in listed.stdout
    for item in ("eagle3", "hs_file", draftsmith.__version__):
        assert item in listed.stdout
    assert "quarantined" not in listed.stdout.lower()


@pytest.mark.slow
def test_a_plugin_shows_its_options_without_torch(with_plugins: FreshEnvironment) -> None:
    assert not (with_plugins.site / "torch").exists()
    shown = with_plugins.run("plugins", "show", "eagle3")
    assert shown.returncode == 0, shown.stderr


@pytest.mark.slow
def test_the_installed_package_is_what_runs(with_plugins: FreshEnvironment) -> None:
    code = (
        "import draftsmith, draftsmith_eagle3, draftsmith_hs_file as f; print(draftsmith.__file__); print(f.__file__)"
    )
    done = subprocess.run(
        [str(with_plugins.python), "-I", "-c", code],
        cwd=with_plugins.folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(line.startswith(str(with_plugins.site)) for line in done.stdout.splitlines())
