"""From a recipe's names to the objects of a run, and every check that needs no torch.

All problems of the recipe, its options, its plugins, the verifier and the files are gathered and raised together, so
that one start tells everything there is to mend.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import attrs
from attrs import field, frozen

from draftsmith import __version__, api
from draftsmith.config.load import DEFAULT, LoadedRecipe, leaves
from draftsmith.config.schema import NamedConfig, Recipe
from draftsmith.config.structure import INVALID, Structurer, plain
from draftsmith.errors import ConfigError, DraftsmithError, Problem, ServingError, VerifierError
from draftsmith.plugins import Catalog, PluginRegistry
from draftsmith.plugins.blame import naming_plugins
from draftsmith.plugins.results import check_items, checked, wrong_result
from draftsmith.stages import STAGES, RunFolders

__all__ = ["RUN_FILE", "ResolvedRun", "resolve"]

#: Written into the output by whoever starts a run: the resolved recipe, plugins and versions.
RUN_FILE = "run.json"

_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".jsonl.zst", ".csv", ".arrow", ".txt", ".yaml")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w./-]+)*")

T = TypeVar("T", bound=api.Item)


@frozen(kw_only=True)
class ResolvedRun:
    """A run, checked: everything that the stages need, and no name left to look up.

    Attributes:
        recipe: as loaded.
        folders: where the run keeps what.
        base: folder of the recipe; paths of data are relative to it.
        verifier: facts of the verifier, read from its files.
        algorithm, architecture, loss, mask, schema, transport: the chosen plugin values.
        algorithm_options, transport_options: instances of their ``options`` classes.
        loss_options: keyword arguments of the loss's implementation.
        loss_parts: the losses that it is made of, and those that they are made of; ``where`` is the recipe's key, and
            options are filled in.
        derived: what options of the algorithm come to that are null, by name.
        requirements: which hidden states must be captured.
        capture_engine: what ``capture.engine`` comes to, with what is installed here: ``vllm`` or ``transformers``.
        speculative_tokens: K written into the checkpoint.
        registry: the loaded plugins.
        provenance: key path of each value → where it came from, options included.
        notes: what works and may surprise.
    """

    recipe: Recipe
    folders: RunFolders
    base: Path
    verifier: api.VerifierFacts
    algorithm: api.Algorithm
    algorithm_options: Any
    derived: Mapping[str, Any] = field(factory=dict)
    architecture: api.DraftArchitecture
    loss: api.Loss
    loss_options: dict[str, Any]
    loss_parts: tuple[api.LossPart, ...] = ()
    mask: api.Mask
    schema: api.CheckpointSchema
    transport: api.Transport
    transport_options: Any
    requirements: api.CaptureRequirements
    capture_engine: str
    speculative_tokens: int
    registry: PluginRegistry
    provenance: Mapping[str, str] = field(factory=dict)
    notes: tuple[str, ...] = ()

    def resolved_recipe(self) -> dict[str, Any]:
        """The recipe as plain values, with the chosen facets and all options filled in."""
        values: dict[str, Any] = plain(self.recipe)
        values["algorithm"] = {"name": self.algorithm.name, "options": plain(self.algorithm_options)}
        values["architecture"] = self.architecture.name
        values["loss"] = {"name": self.loss.name, "options": plain(self.loss_options)}
        values["mask"] = self.mask.name
        values["schema"] = self.schema.name
        values["transport"] = {"name": self.transport.name, "options": plain(self.transport_options)}
        values["export"]["speculative_tokens"] = self.speculative_tokens
        return values

    def record(self) -> dict[str, Any]:
        """What ``run.json`` holds."""
        return {
            "draftsmith": __version__,
            "recipe": self.resolved_recipe(),
            "recipe_folder": str(self.base),
            "provenance": dict(self.provenance),
            "verifier": {"path": str(self.verifier.path), "fingerprint": self.verifier.fingerprint},
            "capture": plain(self.requirements),
            "plugins": [
                {"plugin": each.name, "distribution": each.provider.distribution, "version": each.provider.version}
                for each in self.registry.plugins
            ],
        }


def resolve(loaded: LoadedRecipe, registry: PluginRegistry, stages: Sequence[str] = STAGES) -> ResolvedRun:
    """Resolve names, structure options, read the verifier's facts, and cross-check.

    Relative paths of data are taken from the recipe's folder; ``verifier``, ``output`` and ``train.warm_start`` from
    the current folder.

    Args:
        stages: those that are to run. What only others need is not asked of this machine: where hidden states were
            captured elsewhere, training needs no engine for them.

    Raises:
        ConfigError: with all problems found, those of ``loaded.problems`` included.
        PluginError: the only problem is a broken plugin that the recipe asks for; or a plugin's code raises what is no
            error of draftsmith's.
    """
    with naming_plugins():
        return _Resolver(loaded, registry, stages).run()


class _Resolver:
    """One resolution; gathers problems in order of the recipe."""

    def __init__(self, loaded: LoadedRecipe, registry: PluginRegistry, stages: Sequence[str]) -> None:
        self.loaded = loaded
        self.stages = stages
        self.recipe = loaded.recipe
        self.registry = registry
        self.problems: list[Problem] = list(loaded.problems)
        self.errors: list[DraftsmithError] = []
        self.provenance = dict(loaded.provenance)
        self.notes: list[str] = []
        self.parts: list[api.LossPart] = []

    def run(self) -> ResolvedRun:
        recipe, registry = self.recipe, self.registry
        verifier = self.verifier()
        algorithm = self.named(registry.algorithms, recipe.algorithm.name, "algorithm.name")
        options = self.options(algorithm, recipe.algorithm.options, "algorithm.options")
        architecture = self.facet(registry.architectures, algorithm, "architecture")
        loss, loss_options = self.loss(algorithm)
        mask = self.facet(registry.masks, algorithm, "mask")
        schema = self.facet(registry.schemas, algorithm, "schema")
        self.fit(algorithm, architecture, schema)
        transport = self.transport()
        wanted = recipe.transport.options if recipe.transport else {}
        transport_options = self.options(transport, wanted, "transport.options")
        self.online(transport)
        for index, name in enumerate(recipe.observers):
            self.named(registry.observers, name, f"observers.{index}")
        self.data()
        self.output()
        requirements = speculative_tokens = engine = None
        if algorithm is not None and options is not None:
            speculative_tokens = self.speculative_tokens(algorithm, options)
            if verifier is not None:
                requirements = self.requirements(algorithm, options, verifier)
            if verifier is not None and requirements is not None and schema is not None:
                self.warm_start(schema, options, verifier, requirements)
        if verifier is not None:
            self.vocabulary(verifier, algorithm)
            self.length(verifier)
            engine = self.engine(verifier, requirements)
        self.raise_problems()
        # Everything below is there: what is missing has left a problem.
        return ResolvedRun(
            recipe=self.recipe,
            folders=RunFolders(Path(recipe.output).expanduser().absolute()),
            base=self.loaded.folder,
            verifier=_there(verifier),
            algorithm=_there(algorithm),
            algorithm_options=options,
            derived=_derived(_there(algorithm), options, _there(verifier)),
            architecture=_there(architecture),
            loss=_there(loss),
            loss_options=_there(loss_options),
            loss_parts=tuple(self.parts),
            mask=_there(mask),
            schema=_there(schema),
            transport=_there(transport),
            transport_options=transport_options,
            requirements=_there(requirements),
            capture_engine=_there(engine),
            speculative_tokens=_there(speculative_tokens),
            registry=registry,
            provenance=self.provenance,
            notes=tuple(self.notes),
        )

    # --- reporting ----------------------------------------------------------------------------------------------

    def report(self, key: str, what: str, hint: str | None = None) -> None:
        self.problems.append(Problem(what, where=self.loaded.locate(key), hint=hint))

    def record(self, error: DraftsmithError, key: str) -> None:
        self.errors.append(error)
        here = self.loaded.locate(key)
        for problem in error.problems:
            inside = problem.where and not problem.where.startswith(here)
            where = f"{here}: {problem.where}" if inside else here
            self.problems.append(Problem(problem.what, where=where, hint=problem.hint))

    def raise_problems(self) -> None:
        if not self.problems:
            return
        # A broken plugin is not the user's mistake: alone, it keeps its own type and exit code.
        if len(self.problems) == 1 and len(self.errors) == 1:
            raise self.errors[0]
        unique = dict.fromkeys(self.problems)
        raise ConfigError(unique)

    # --- names and options --------------------------------------------------------------------------------------

    def named(self, catalog: Catalog[T], name: str, key: str) -> T | None:
        if any(key == each or key.startswith(f"{each}.") for each in self.loaded.broken):
            return None  # already reported
        try:
            return catalog.get(name, where=self.loaded.locate(key))
        except DraftsmithError as error:
            self.record(error, key)
            return None

    def facet(self, catalog: Catalog[T], algorithm: api.Algorithm | None, key: str) -> T | None:
        chosen = getattr(self.recipe, key)
        if chosen is not None:
            return self.named(catalog, chosen, key)
        if algorithm is None:
            return None
        self.provenance[key] = self.default_of(algorithm)
        return self.named(catalog, getattr(algorithm, key), key)

    def fit(
        self,
        algorithm: api.Algorithm | None,
        architecture: api.DraftArchitecture | None,
        schema: api.CheckpointSchema | None,
    ) -> None:
        """Whether what the recipe puts together declares that it fits. An algorithm knows its own defaults to fit."""
        if algorithm is None or architecture is None or schema is None:
            return
        changed = architecture.name != algorithm.architecture
        if changed and architecture.algorithms and algorithm.name not in architecture.algorithms:
            self.report(
                "architecture",
                f"the draft architecture {architecture.name!r} is made for {', '.join(architecture.algorithms)}, "
                f"and not for {algorithm.name}",
                f"leave it out: {algorithm.name} has {algorithm.architecture!r}",
            )
            return
        changed |= schema.name != algorithm.schema
        if changed and schema.architectures and architecture.name not in schema.architectures:
            self.report(
                "architecture" if schema.name == algorithm.schema else "schema",
                f"the checkpoint schema {schema.name!r} holds the tensors of {', '.join(schema.architectures)}, "
                f"and not those of the draft architecture {architecture.name!r}",
                f"leave architecture and schema out: {algorithm.name} has {algorithm.architecture!r} "
                f"and {algorithm.schema!r}",
            )

    def default_of(self, algorithm: api.Algorithm) -> str:
        return f"default of {algorithm.name} ({self.registry.algorithms.provider(algorithm.name)})"

    def options(
        self,
        item: api.Item | None,
        data: Mapping[str, Any],
        key: str,
        defaults: Mapping[str, Any] | None = None,
        defaults_from: str = DEFAULT,
    ) -> Any:
        """An instance of the item's options class, or None after a problem (or where it has no options)."""
        if item is None:
            return None
        cls = getattr(item, "options", None)
        if cls is None:
            for name in data:
                self.report(f"{key}.{name}", f"{item.name!r} has no options")
            return None
        structurer = Structurer(self.loaded.locate)
        options = structurer.build(cls, {**(defaults or {}), **data}, key)
        self.problems += structurer.problems
        for name in defaults or ():
            if name not in data:
                self.provenance[f"{key}.{name}"] = defaults_from
        self.loaded_options(cls, data, key, item.name)
        return None if options is INVALID or structurer.problems else options

    def loaded_options(self, cls: type, data: Mapping[str, Any], key: str, name: str) -> None:
        """Provenance of options that the recipe leaves out."""
        self.provenance.pop(key, None)
        for each in attrs.fields(cls):
            if each.name not in data:
                self.provenance.setdefault(f"{key}.{each.name}", f"default of {name}")
        for path, _ in leaves(dict(data), key):
            self.provenance.setdefault(path, DEFAULT)

    def loss(self, algorithm: api.Algorithm | None) -> tuple[api.Loss | None, dict[str, Any] | None]:
        wanted: NamedConfig | None = self.recipe.loss
        defaults: Mapping[str, Any] = {}
        origin = DEFAULT
        if wanted is None:
            if algorithm is None:
                return None, None
            wanted = NamedConfig(name=algorithm.loss)
            self.provenance["loss.name"] = self.default_of(algorithm)
        if algorithm is not None and wanted.name == algorithm.loss:
            defaults, origin = algorithm.loss_options, self.default_of(algorithm)
        self.provenance.pop("loss", None)
        loss = self.named(self.registry.losses, wanted.name, "loss.name")
        options = self.options(loss, wanted.options, "loss.options", defaults, origin)
        if loss is None or options is None:
            return loss, {}
        self.gather_parts(loss, options, "loss.options")
        return loss, {each.name: getattr(options, each.name) for each in attrs.fields(type(options))}

    def gather_parts(self, loss: api.Loss, options: Any, key: str) -> None:
        """Check the losses that this one is made of, and keep them."""
        for part in check_items(loss.parts, loss.parts(options), api.LossPart):
            here = f"{key}.{part.where}" if part.where else key
            inner = self.named(self.registry.losses, part.name, here)
            chosen = self.options(inner, part.options, f"{here}.options")
            self.parts.append(api.LossPart(name=part.name, options=plain(chosen) or {}, where=here))
            if inner is not None and chosen is not None:
                self.gather_parts(inner, chosen, f"{here}.options")

    def transport(self) -> api.Transport | None:
        catalog = self.registry.transports
        if self.is_broken("transport"):
            return None
        if self.recipe.transport is not None:
            transport = self.named(catalog, self.recipe.transport.name, "transport.name")
        else:
            self.provenance.pop("transport", None)
            # The core chooses by guarantees, never by name.
            online = self.recipe.captures_online
            fitting = [each for each in catalog if online or _keeps(each)]
            if len(fitting) != 1:
                self.report("transport", *_choose_transport([each.name for each in fitting]))
                return None
            transport = self.named(catalog, fitting[0].name, "transport")
            self.provenance["transport.name"] = "the only installed one that fits"
        if transport is not None and not (self.recipe.captures_online or _keeps(transport)):
            self.report(
                "transport",
                f"transport {transport.name!r} does not keep its samples, and training reads them many times",
                "capture while training (capture.mode: online), or choose a transport that is persistent and has "
                "random access",
            )
        return transport

    def online(self, transport: api.Transport | None) -> None:
        """What is asked of ``online``, whose keys mean something only where states are captured while training."""
        wanted = self.recipe.online
        if not self.recipe.captures_online:
            given = [name for name in plain(wanted) if self.provenance.get(f"online.{name}", DEFAULT) != DEFAULT]
            if given:
                keys = ", ".join(f"online.{name}" for name in given)
                self.notes.append(f"without capture.mode: online, nothing comes of {keys}")
            return
        named: set[str] = set()
        for index, url in enumerate(wanted.endpoints):
            key = f"online.endpoints.{index}"
            if (problem := _url_problem(url)) is not None:
                self.report(key, f"{url!r} is no address of a server: {problem}", "write it as http://HOST:PORT")
            elif url.rstrip("/").lower() in named:
                self.report(key, f"the endpoint {url} is named twice", "name every server once")
            named.add(url.rstrip("/").lower())
        if wanted.keep and transport is not None and not transport.guarantees.random_access:
            self.report(
                "online.keep",
                f"transport {transport.name!r} gives a sample only once, and later epochs read it again",
                "leave online.keep out, or choose a transport with random access",
            )
        if wanted.in_flight > wanted.ahead:
            self.notes.append(
                f"online.in_flight ({wanted.in_flight}) is more than online.ahead ({wanted.ahead}): no more than "
                f"{wanted.ahead} samples are ever asked for"
            )

    # --- the verifier and what depends on it --------------------------------------------------------------------

    def verifier(self) -> api.VerifierFacts | None:
        if "verifier" in self.loaded.broken:
            return None
        from draftsmith.verifier import read_verifier

        try:
            return read_verifier(self.recipe.verifier)
        except VerifierError as error:
            self.record(self.where_to_get_it(error), "verifier")
            return None

    def where_to_get_it(self, error: VerifierError) -> VerifierError:
        """*error* of a verifier; where it is not there, with a hint at the recipe's opening comment.

        Models that are made, not downloaded, are told of there, as in the examples: the hub's name of none leads on.
        """
        recipe = self.loaded.path
        if Path(self.recipe.verifier).expanduser().exists() or not recipe.read_bytes().startswith(b"#"):
            return error
        hint = f"{error.hint}; the comment at the top of {recipe.name} may say how it is made"
        return VerifierError(error.what, where=error.where, hint=hint)

    def requirements(
        self, algorithm: api.Algorithm, options: Any, verifier: api.VerifierFacts
    ) -> api.CaptureRequirements | None:
        told = check_items(algorithm.check, algorithm.check(options, verifier), Problem)
        found = [self.option_problem(each) for each in told]
        self.problems += found
        if not found:
            self.notes += check_items(algorithm.notes, algorithm.notes(options, verifier), str)
        try:
            requirements = algorithm.requirements(options, verifier)
        except ValueError as error:
            if not found:
                self.report("algorithm.options", str(error))
            return None
        checked(algorithm.requirements, requirements, api.CaptureRequirements, "draftsmith.api.CaptureRequirements")
        beyond = [each for each in requirements.layer_ids if each > verifier.num_layers]
        if beyond and not found:
            self.report(
                "algorithm.options",
                f"layer ids {beyond} do not exist: the verifier has {verifier.num_layers} layers",
                f"layer ids go from 0 (the embedding) to {verifier.num_layers}",
            )
        elif not found:
            from draftsmith.capture.plan import check_verifier

            try:
                check_verifier(verifier, requirements)
            except VerifierError as error:
                self.record(error, "verifier")
        return requirements

    def warm_start(
        self,
        schema: api.CheckpointSchema,
        options: Any,
        verifier: api.VerifierFacts,
        requirements: api.CaptureRequirements,
    ) -> None:
        key = "train.warm_start"
        if self.recipe.train.warm_start is None or self.is_broken(key):
            return
        if not set(self.stages) & set(STAGES[: STAGES.index("train") + 1]):
            return  # what training began from need not be there any more
        from draftsmith.checkpoint.warm_start import vocabulary_problems, warm_start_problems

        folder = Path(self.recipe.train.warm_start).expanduser()
        try:
            found = warm_start_problems(folder, schema, options, verifier, requirements)
            found += vocabulary_problems(folder, self.recipe.vocabulary.draft_size, verifier)
        except DraftsmithError as error:
            self.record(error, key)
            return
        self.problems += [
            Problem(each.what, where=f"{self.loaded.locate(key)}: {each.where or folder}", hint=each.hint)
            for each in found
        ]

    def option_problem(self, problem: Problem) -> Problem:
        """An algorithm names the option concerned; the recipe's place is added here."""
        where = problem.where
        key = "algorithm.options"
        if where and where.startswith(f"{key}."):
            where = where[len(key) + 1 :]
        inside = where is None or re.fullmatch(r"[\w.]+", where)
        place = self.loaded.locate(f"{key}.{where}" if where else key) if inside else where
        return Problem(problem.what, where=place, hint=problem.hint)

    def speculative_tokens(self, algorithm: api.Algorithm, options: Any) -> int:
        told = algorithm.max_speculative_tokens(options)
        trained = checked(algorithm.max_speculative_tokens, told, int, "a number of tokens")
        wanted = self.recipe.export.speculative_tokens
        if wanted is None:
            self.provenance["export.speculative_tokens"] = f"as trained by {algorithm.name}"
            return trained
        if wanted > trained:
            self.report(
                "export.speculative_tokens",
                f"{wanted} is more than the {trained} tokens that {algorithm.name} is trained to draft",
                f"choose at most {trained}, or train more steps; `draftsmith plugins show {algorithm.name}`",
            )
        return wanted

    def vocabulary(self, verifier: api.VerifierFacts, algorithm: api.Algorithm | None) -> None:
        size = self.recipe.vocabulary.draft_size
        if algorithm is not None and algorithm.full_vocabulary and size not in (None, verifier.vocab_size):
            self.report(
                "vocabulary.draft_size",
                f"drafts of {algorithm.name} propose every token of the verifier's vocabulary, not {size} of them",
                "leave it out",
            )
            return
        if size is not None and size > verifier.vocab_size:
            self.report(
                "vocabulary.draft_size",
                f"the draft's vocabulary ({size}) is larger than the verifier's ({verifier.vocab_size})",
                f"choose at most {verifier.vocab_size}, or null for all tokens",
            )

    def length(self, verifier: api.VerifierFacts) -> None:
        wanted, row = self.recipe.data.max_length, self.recipe.train.tokens_per_row
        most = most_positions(verifier)
        if most is not None and wanted > most and self.provenance.get("data.max_length") == DEFAULT:
            self.recipe = attrs.evolve(self.recipe, data=attrs.evolve(self.recipe.data, max_length=most))
            self.provenance["data.max_length"] = "positions of the verifier"
            wanted = most
        elif most is not None and wanted > most:
            self.report(
                "data.max_length",
                f"rows of {wanted} tokens are longer than the {most} positions that the verifier knows",
                f"choose at most {most}",
            )
        if wanted > row:
            self.notes.append(
                f"rows are captured up to data.max_length ({wanted} tokens), and training cuts them at"
                f" train.tokens_per_row ({row})"
            )

    def engine(self, verifier: api.VerifierFacts, requirements: api.CaptureRequirements | None) -> str:
        """The engine of the capture. What it cannot do is told now, not when prepare has spent its hours."""
        from draftsmith.capture.engines import choose_engine, verifier_problem

        wanted = self.recipe.capture.engine
        try:
            chosen = choose_engine(wanted, verifier)
        except ServingError as error:
            chosen = wanted
            if self.needs_engine():
                self.report("capture.engine", error.what, error.hint)
        untapped = verifier_problem(verifier)
        # The last layer's output is in every engine's hand; a draft of it is served whatever can be tapped.
        taps = requirements is not None and any(each < verifier.num_layers for each in requirements.layer_ids)
        if untapped and taps and chosen == "transformers":
            captured = "transformers captures them, and " if wanted == "auto" else ""
            self.notes.append(f"{untapped}: {captured}that vLLM will refuse to serve a draft that reads them")
        return chosen

    def needs_engine(self) -> bool:
        """Whether this command runs the verifier to capture its states."""
        if self.recipe.captures_online:
            return "train" in self.stages and not self.recipe.online.endpoints
        return "capture" in self.stages

    # --- files --------------------------------------------------------------------------------------------------

    def data(self) -> None:
        if not self.stages:
            return  # conversations need not be where a server captures for a run elsewhere
        data = self.recipe.data
        if not data.sources and not self.is_broken("data.sources"):
            self.report("data.sources", "no conversations are named", "data: {sources: [conversations.jsonl]}")
        for index, source in enumerate(data.sources):
            self.file(source, f"data.sources.{index}", may_be_hub=True)
        if self.recipe.verify.prompts is not None:
            self.file(self.recipe.verify.prompts, "verify.prompts", may_be_hub=False)

    def is_broken(self, key: str) -> bool:
        return any(
            each == key or each.startswith(f"{key}.") or key.startswith(f"{each}.") for each in self.loaded.broken
        )

    def file(self, name: str, key: str, *, may_be_hub: bool) -> None:
        path = self.loaded.folder / Path(name).expanduser()
        if path.is_file() and may_be_hub:
            self.suffix(path, key)
            return
        if path.is_file() or (path.is_dir() and may_be_hub):
            return
        if any(each in name for each in "*?[") and any(self.loaded.folder.glob(name)):
            return
        if may_be_hub and _HUB_NAME.fullmatch(name) and not name.lower().endswith(_DATA_SUFFIXES):
            return  # a hub's data set; whether it can be reached is found out when it is read
        self.report(key, f"there is no file {path}", _near_file(path) or "paths of data are relative to the recipe")

    def suffix(self, path: Path, key: str) -> None:
        from draftsmith.data.conversations import SUFFIXES

        if path.suffix not in SUFFIXES:
            self.report(
                key,
                f"files of the kind {path.suffix or path.name!r} are not read",
                f"convert it to one of {', '.join(SUFFIXES)}",
            )

    def output(self) -> None:
        if self.is_broken("output"):
            return
        if not self.recipe.output:
            self.report("output", "must name a folder")
            return
        path = Path(self.recipe.output).expanduser().absolute()
        existing = next(each for each in (path, *path.parents) if each.exists())
        if not existing.is_dir():
            self.report("output", f"{existing} is a file, not a folder", "choose another output")
        elif not os.access(existing, os.W_OK | os.X_OK):
            self.report("output", f"cannot write into {existing}", "choose an output folder you can write to")


def most_positions(verifier: api.VerifierFacts) -> int | None:
    """The longest context of the verifier, a stretched rope included; None where its configuration does not say."""
    keys = ("max_position_embeddings", "n_positions")
    if all(verifier.text_config.get(key) is None for key in keys):
        return None
    rope = verifier.rope_parameters
    stretched = float(rope.get("original_max_position_embeddings") or 0) * float(rope.get("factor") or 1)
    return max(verifier.max_position_embeddings, int(stretched))


def _derived(algorithm: api.Algorithm, options: Any, verifier: api.VerifierFacts) -> dict[str, Any]:
    """Of what the algorithm derives, that of options which are null."""
    found = checked(algorithm.derived, algorithm.derived(options, verifier), Mapping, "options by name")
    if unknown := found.keys() - {each.name for each in attrs.fields(type(options))}:
        raise wrong_result(algorithm.derived, found, f"options by name, and {sorted(unknown)} are none")
    return {name: plain(value) for name, value in found.items() if getattr(options, name) is None}


def _there(value: Any) -> Any:
    if value is None:
        raise AssertionError("something is missing and left no problem")
    return value


def _keeps(transport: api.Transport) -> bool:
    """Whether its samples can be captured by a stage of their own, and read by every epoch after."""
    return transport.guarantees.persistent and transport.guarantees.random_access


def _url_problem(url: str) -> str | None:
    """Why *url* is no address of an HTTP server, or None."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "it begins with neither http:// nor https://"
    if not parts.hostname:
        return "it names no host"
    if parts.path.rstrip("/").endswith("/v1"):
        return "/v1 is the path of one of its interfaces"
    if port == 0 or parts.query or parts.fragment:
        return "port 0 cannot be reached" if port == 0 else "it has more than a host, a port and a path"
    return None


def _choose_transport(names: Sequence[str]) -> tuple[str, str]:
    if names:
        return (
            f"several hidden-state transports are installed: {', '.join(names)}",
            f"choose one: transport: {names[0]}",
        )
    return (
        "no hidden-state transport is installed that keeps its samples",
        "install the plugin of one (a distribution draftsmith-…, see the README); `draftsmith plugins list` shows "
        "what is there",
    )


def _near_file(path: Path) -> str | None:
    import difflib

    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return f"there is no folder {path.parent} either"
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"in that folder: {', '.join(near)}" if near else None
