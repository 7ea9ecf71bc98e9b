"""Fake distributions on disk: a dist-info folder with entry points, and the modules they name."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

#: A distribution that is not installed: an algorithm and a transport for the tests of training.
TINY = Path(__file__).parent / "tiny"


class FakeSite:
    """A folder on ``sys.path`` in which distributions are installed by writing their metadata."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(
        self,
        distribution: str,
        entry_points: Mapping[str, str],
        *,
        version: str = "1.0",
        group: str = "draftsmith.v1",
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """Install *distribution* with entry points (name → reference) and module sources."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {reference}" for name, reference in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        for name, source in (modules or {}).items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
            self.modules.append(name)
        importlib.invalidate_caches()

    def install_loss(self, distribution: str, plugin: str, loss: str, *, version: str = "1.0") -> None:
        """A sound plugin with one loss."""
        module = f"fake_{plugin}_{distribution.replace('-', '_')}"
        source = f"""
            from draftsmith import api
            from draftsmith.hookspecs import hookimpl

            @hookimpl
            def draftsmith_losses():
                return [api.Loss(name={loss!r}, summary="a loss", implementation="{module}:Loss")]
        """
        self.install(distribution, {plugin: module}, version=version, modules={module: source})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """An empty folder on ``sys.path`` for fake distributions; what they import is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("DRAFTSMITH_PLUGINS", raising=False)
    monkeypatch.delenv("DRAFTSMITH_DISABLE_PLUGINS", raising=False)
    fake = FakeSite(folder)
    yield fake
    for name in fake.modules:
        sys.modules.pop(name, None)


#: A plugin with one item of every kind that a run needs; `implementation`s are never imported by resolving.
TINKER = """
    from typing import Literal

    from attrs import field, frozen
    from attrs.validators import ge

    from draftsmith import api
    from draftsmith.hookspecs import hookimpl


    @frozen(kw_only=True)
    class Options:
        steps: int = field(default=3, validator=ge(1), metadata={"help": "steps that are trained"})
        layer_ids: tuple[int, ...] = field(default=(1, 2), metadata={"help": "tapped layers"})
        flavour: Literal["plain", "spicy"] = field(default="plain", metadata={"help": "taste"})
        scale: float | None = field(default=None, metadata={"help": "factor"})


    @frozen(kw_only=True)
    class TransportOptions:
        fsync: bool = field(default=True, metadata={"help": "wait for the disk"})


    def check(options, verifier):
        if options.layer_ids[-1] > verifier.num_layers:
            yield api.Problem(f"there is no layer {options.layer_ids[-1]}", where="layer_ids", hint="lower it")


    @hookimpl
    def draftsmith_algorithms():
        return [
            api.Algorithm(
                name="tinker",
                summary="an algorithm",
                implementation="nowhere:Algorithm",
                options=Options,
                architecture="tinker",
                loss="sum",
                loss_options={"terms": {"ce": 0.5, "tv": 0.5}},
                mask="causal",
                schema="tinker",
                requirements=lambda options, verifier: api.CaptureRequirements(layer_ids=options.layer_ids),
                check=check,
                notes=lambda options, verifier: ["spicy drafts burn"] if options.flavour == "spicy" else [],
                derived=lambda options, verifier: {"scale": verifier.num_layers / 2, "steps": 99},
                max_speculative_tokens=lambda options: options.steps,
            )
        ]


    @hookimpl
    def draftsmith_draft_architectures():
        return [api.DraftArchitecture(name="tinker", summary="a network", implementation="nowhere:Network")]


    @hookimpl
    def draftsmith_checkpoint_schemas():
        return [api.CheckpointSchema(name="tinker", summary="a format", implementation="nowhere:Format")]


    @hookimpl
    def draftsmith_transports():
        kept = api.TransportGuarantees(persistent=True, random_access=True, concurrent_writers=True)
        gone = api.TransportGuarantees(persistent=False, random_access=False, concurrent_writers=True)
        return [
            api.Transport(
                name="shelf",
                summary="keeps",
                implementation="nowhere:Shelf",
                options=TransportOptions,
                guarantees=kept,
            ),
            api.Transport(
                name="stream",
                summary="forgets",
                implementation="nowhere:Stream",
                options=TransportOptions,
                guarantees=gone,
            ),
        ]
"""


@pytest.fixture
def tinker(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """A site with the plugin ``tinker`` 2.5, and with none of those that happen to be installed beside the core."""
    site.install("draftsmith-tinker", {"tinker": "fake_tinker"}, version="2.5", modules={"fake_tinker": TINKER})
    monkeypatch.setenv("DRAFTSMITH_PLUGINS", "tinker")
    return site


@pytest.fixture(scope="module")
def case() -> Iterator[ModuleType]:
    """``draftsmith_tiny.case``, whose distribution this process finds, and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TINY))
        patch.setenv("PYTHONPATH", f"{TINY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield importlib.import_module("draftsmith_tiny.case")


@pytest.fixture(scope="session")
def verifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random verifier."""
    from draftsmith.testing.verifiers import make_tiny_verifier

    return make_tiny_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def recipe(tmp_path: Path, verifier_folder: Path) -> Path:
    """A correct recipe for the plugin of the fixture ``tinker``."""
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"verifier: {verifier_folder}\n"
        "algorithm: tinker\n"
        f"output: {tmp_path / 'out'}\n"
        "data:\n"
        "  sources: [chats.jsonl]\n"
    )
    return path
