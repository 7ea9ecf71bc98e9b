"""Loading plugins: filter, import, check, call the registration hooks once, and keep what they return.

A plugin that is broken in any way is set aside with its reason (*quarantined*) and harms nobody until a run asks for
it: by name in ``plugins:``, or by the name of something that it provides.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import pluggy
from attrs import field, frozen

from draftsmith import __version__, api, hookspecs
from draftsmith.errors import (
    DraftsmithError,
    PluginConflictError,
    PluginError,
    UnknownNameError,
    UserError,
    did_you_mean,
)
from draftsmith.plugins.blame import describe, line_of
from draftsmith.plugins.catalog import Catalog, conflict_error
from draftsmith.plugins.discovery import Candidate, ForeignPlugin, Provider, discover, normalize

__all__ = [
    "ALLOW_VARIABLE",
    "BLOCK_VARIABLE",
    "EVENTS",
    "FACETS",
    "RESERVED_COMMANDS",
    "Facet",
    "LoadedPlugin",
    "PluginRegistry",
    "QuarantinedPlugin",
    "SwitchedOffPlugin",
    "load_plugins",
    "load_reference",
    "missing_extra",
]

#: Environment variables with names separated by commas or spaces.
BLOCK_VARIABLE = "DRAFTSMITH_DISABLE_PLUGINS"
ALLOW_VARIABLE = "DRAFTSMITH_PLUGINS"

#: One entry of a recipe's list of plugins.
_PIN = re.compile(r"([\w.-]+)\s*(?:==\s*([\w.+!-]+))?")

#: Importing one of these in a plugin's own module makes every command wait for it.
_HEAVY = ("torch", "transformers", "datasets", "numpy", "vllm")
#: What the extra ``train`` brings along.
_TRAINING = (*_HEAVY[:-1], "httpx", "tensorboard", "tokenizers", "xxhash")
#: Seconds of processor time from which an import is remarked on: the commands themselves answer in a tenth of one.
_SLOW_IMPORT = 0.3


@frozen
class Facet:
    """One registration hook: its name, the registry's attribute, the kind in messages, the type of its values."""

    hook: str
    catalog: str
    kind: str
    type: type[api.Item]


FACETS = (
    Facet("draftsmith_algorithms", "algorithms", "algorithm", api.Algorithm),
    Facet("draftsmith_draft_architectures", "architectures", "draft architecture", api.DraftArchitecture),
    Facet("draftsmith_losses", "losses", "loss", api.Loss),
    Facet("draftsmith_masks", "masks", "mask", api.Mask),
    Facet("draftsmith_checkpoint_schemas", "schemas", "checkpoint schema", api.CheckpointSchema),
    Facet("draftsmith_transports", "transports", "transport", api.Transport),
    Facet("draftsmith_observers", "observers", "observer", api.Observer),
    Facet("draftsmith_prompt_sets", "prompt_sets", "prompt set", api.PromptSet),
    Facet("draftsmith_commands", "commands", "command", api.Command),
)

#: Names of the core's own commands, which no plugin may take.
RESERVED_COMMANDS = (
    "run",
    "prepare",
    "capture",
    "train",
    "export",
    "verify",
    "evaluate",
    "report",
    "serve",
    "watch",
    "lint",
    "plugins",
    "doctor",
)

#: Observer hooks, in the order of a run.
EVENTS = (
    "draftsmith_run_started",
    "draftsmith_step_finished",
    "draftsmith_checkpoint_saved",
    "draftsmith_run_finished",
)

#: Kinds that come in distributions of their own, named after the item.
_KINDS_WITH_OWN_DISTRIBUTION = ("algorithm", "transport")


@frozen(kw_only=True)
class LoadedPlugin:
    """A plugin in use.

    Attributes:
        module: the object that its entry point names.
        items: kind → names, of what it registered.
        events: observer hooks that it implements itself.
        warnings: what its author should mend.
    """

    provider: Provider
    module: Any = field(repr=False, eq=False)
    items: Mapping[str, Sequence[str]]
    events: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.provider.plugin


@frozen(kw_only=True)
class QuarantinedPlugin:
    """A plugin set aside. *error* is raised when a run asks for it.

    Attributes:
        offered: kind → names that it registered before it failed.
    """

    provider: Provider
    error: PluginError = field(eq=False)
    offered: Mapping[str, Sequence[str]] = field(factory=dict)

    @property
    def name(self) -> str:
        return self.provider.plugin

    @property
    def reason(self) -> str:
        """Without the name and distribution, which :attr:`error` has as well."""
        return self.error.what.removeprefix(f"plugin {self.name!r} of {self.provider} ")


@frozen(kw_only=True)
class SwitchedOffPlugin:
    """A plugin that a block or allow list keeps out; it was not imported.

    Attributes:
        remedy: what lets it in.
    """

    provider: Provider
    reason: str
    remedy: str

    @property
    def name(self) -> str:
        return self.provider.plugin


class PluginRegistry:
    """Everything that the loaded plugins provide, by kind and name.

    Pickling stores only what was asked for; the other process discovers and loads again.
    """

    def __init__(self, *, disabled: Sequence[str] = (), only: Sequence[str] | None = None) -> None:
        self._asked = {"disabled": tuple(disabled), "only": None if only is None else tuple(only)}
        self.algorithms: Catalog[api.Algorithm] = Catalog("algorithm", self._explain)
        self.architectures: Catalog[api.DraftArchitecture] = Catalog("draft architecture", self._explain)
        self.losses: Catalog[api.Loss] = Catalog("loss", self._explain)
        self.masks: Catalog[api.Mask] = Catalog("mask", self._explain)
        self.schemas: Catalog[api.CheckpointSchema] = Catalog("checkpoint schema", self._explain)
        self.transports: Catalog[api.Transport] = Catalog("transport", self._explain)
        self.observers: Catalog[api.Observer] = Catalog("observer", self._explain)
        self.prompt_sets: Catalog[api.PromptSet] = Catalog("prompt set", self._explain)
        self.commands: Catalog[api.Command] = Catalog("command", self._explain)
        self.plugins: list[LoadedPlugin] = []
        self.quarantined: list[QuarantinedPlugin] = []
        self.switched_off: list[SwitchedOffPlugin] = []
        self.foreign: list[ForeignPlugin] = []
        self.conflicts: list[PluginConflictError] = []
        #: Remarks on the environment's lists: names there that mean nothing here.
        self.notes: list[str] = []

    def catalog(self, facet: Facet) -> Catalog[Any]:
        """The catalog of one registration hook."""
        catalog: Catalog[Any] = getattr(self, facet.catalog)
        return catalog

    @property
    def providers(self) -> list[Provider]:
        """Of all plugins that are installed, in use or not."""
        in_use = [each.provider for each in self.plugins]
        broken = [each.provider for each in self.quarantined]
        off = [each.provider for each in self.switched_off]
        return [*in_use, *broken, *off, *(each.provider for each in self.foreign)]

    def require(self, name: str, where: str | None = None) -> None:
        """Make sure that the plugin of that name (or of the distribution of that name) is loaded.

        Raises:
            PluginError: it is quarantined, switched off, or made for another API version.
            UnknownNameError: it is not installed.
        """
        if any(each.provider.answers_to(name) for each in self.plugins):
            return
        known = [each.name for each in self.plugins] + [each.name for each in self.switched_off]
        raise self.reason(name) or UnknownNameError(
            "plugin", name, known, where=where, hint=f"pip install {distribution_of(name)}"
        )

    def reason(self, name: str) -> DraftsmithError | None:
        """Why the plugin of that name is not in use, where one is installed."""
        for broken in self.quarantined:
            if broken.provider.answers_to(name):
                return broken.error
        for off in self.switched_off:
            if off.provider.answers_to(name):
                return _switched_off(off)
        for foreign in self.foreign:
            if foreign.provider.answers_to(name):
                return PluginError(
                    f"plugin {foreign.provider.plugin!r} of {foreign.provider} is {foreign.reason}",
                    hint="see `draftsmith plugins list`",
                )
        return None

    def _explain(self, kind: str, name: str, known: Sequence[str], where: str | None) -> DraftsmithError:
        for broken in self.quarantined:
            if name in broken.offered.get(kind, ()):
                return broken.error
        if kind in _KINDS_WITH_OWN_DISTRIBUTION and (reason := self.reason(name)):
            return reason
        hints = []
        if kind in _KINDS_WITH_OWN_DISTRIBUTION:
            hints.append(f"the plugin that provides it may be missing: pip install {distribution_of(name)}")
        else:
            hints.append(f"the package that provides this {kind} may be missing: pip install it beside draftsmith")
        aside = [each.name for each in self.quarantined] + [each.name for each in self.switched_off]
        if aside:
            hints.append(f"not in use: {', '.join(aside)} (`draftsmith plugins list` says why)")
        return UnknownNameError(kind, name, known, where=where, hint="; ".join(hints))

    def __reduce__(self) -> tuple[Callable[..., PluginRegistry], tuple[Any, ...]]:
        return _reload, (self._asked["disabled"], self._asked["only"])


def _reload(disabled: Sequence[str], only: Sequence[str] | None) -> PluginRegistry:
    return load_plugins(disabled=disabled, only=only)


def distribution_of(name: str) -> str:
    name = normalize(name)
    return name if name.startswith(f"{api.PROJECT_NAME}-") else f"{api.PROJECT_NAME}-{name}"


def _switched_off(plugin: SwitchedOffPlugin) -> PluginError:
    error = PluginError(
        f"plugin {plugin.name!r} of {plugin.provider} is switched off: {plugin.reason}",
        hint=f"{plugin.remedy}, or choose something else",
    )
    error.exit_code = 2
    return error


def load_plugins(
    *, disabled: Iterable[str] = (), only: Iterable[str] | None = None, raise_conflicts: bool = True
) -> PluginRegistry:
    """Discover, filter, import and check all plugins, and collect what they register.

    Args:
        disabled: names of plugins or distributions not to import, beside those of ``DRAFTSMITH_DISABLE_PLUGINS``.
        only: import no others than these (the core's own excepted); None: all, or those of ``DRAFTSMITH_PLUGINS``.
            ``name==version`` takes that version of the distribution and no other.
        raise_conflicts: False collects them in ``registry.conflicts`` instead (for listing).

    Raises:
        PluginConflictError: two distributions claim one name.
        PluginError: a plugin named in *only* is broken, made for another API version, or not of the version asked for.
        UnknownNameError: a plugin named in *disabled* or *only* is not installed.
        UserError: an entry of *only* is neither a name nor ``name==version``.
    """
    blocked, asked = list(disabled), None if only is None else list(only)
    registry = PluginRegistry(disabled=blocked, only=asked)
    pins = [_pin(name) for name in asked or ()]
    allowed = None if asked is None else [name for name, _ in pins]
    found = discover()
    registry.foreign.extend(found.foreign)
    everyone = [each.provider for each in found.candidates] + [each.provider for each in found.foreign]
    for name in blocked:
        if not any(provider.answers_to(name) for provider in everyone):
            raise UnknownNameError("plugin", name, [each.plugin for each in everyone], where="--no-plugin")

    # A flag or recipe that names what is not there is an error; a variable may serve several environments.
    for variable in (BLOCK_VARIABLE, ALLOW_VARIABLE):
        registry.notes += [
            f"{variable} names {name!r}, which is not installed"
            for name in _names_in(variable) or ()
            if not any(provider.answers_to(name) for provider in everyone)
        ]
    kept = _filter(found.candidates, blocked, allowed, registry)
    manager = pluggy.PluginManager(api.PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    for candidate in kept:
        rivals = [each.provider for each in kept if each.name == candidate.name]
        if len(rivals) > 1:
            error = conflict_error("plugin", candidate.name, rivals)
            registry.quarantined.append(QuarantinedPlugin(provider=candidate.provider, error=error))
            if error.what not in [each.what for each in registry.conflicts]:
                registry.conflicts.append(error)
            continue
        _load(candidate, manager, registry)

    core = Provider(distribution=api.PROJECT_NAME, version=__version__, plugin="builtin")
    for name in RESERVED_COMMANDS:
        registry.commands.reserve(name, core)
    for facet in FACETS:
        registry.conflicts.extend(registry.catalog(facet).conflicts())
    if raise_conflicts and registry.conflicts:
        raise registry.conflicts[0]
    for name, version in pins:
        registry.require(name, where="plugins")
        _check_pin(name, version, [each.provider for each in registry.plugins])
    return registry


def _pin(name: str) -> tuple[str, str | None]:
    """``name==version`` or ``name`` → (name, version or None)."""
    match = _PIN.fullmatch(name.strip())
    if match is None:
        raise UserError(
            f"{name!r} is neither a plugin nor a plugin and its version",
            where="plugins",
            hint="write NAME, or NAME==VERSION for that version and no other",
        )
    return match[1], match[2]


def _check_pin(name: str, version: str | None, providers: Sequence[Provider]) -> None:
    """Refuse a plugin of another version than the recipe asks for."""
    for provider in providers:
        if version is not None and provider.answers_to(name) and provider.version != version:
            error = PluginError(
                f"plugin {provider.plugin!r} of {provider} is installed, and the recipe asks for version {version}",
                where="plugins",
                hint=f"pip install '{provider.distribution}=={version}', or change the recipe",
            )
            error.exit_code = 2
            raise error


def _names_in(variable: str) -> list[str] | None:
    value = os.environ.get(variable)
    return None if value is None else value.replace(",", " ").split()


def _filter(
    candidates: Sequence[Candidate], blocked: Sequence[str], allowed: Sequence[str] | None, registry: PluginRegistry
) -> list[Candidate]:
    """Apply both lists, before anything is imported."""
    from_environment = _names_in(BLOCK_VARIABLE) or []
    environment_only = _names_in(ALLOW_VARIABLE)
    kept: list[Candidate] = []
    for candidate in candidates:
        provider = candidate.provider
        # An allow list is about additions: leaving the core's own losses and masks out of it must not lose them.
        own = normalize(provider.distribution) == api.PROJECT_NAME
        why = None
        if any(provider.answers_to(name) for name in blocked):
            why = f"by --no-plugin {provider.plugin}", "leave that option out"
        elif any(provider.answers_to(name) for name in from_environment):
            why = f"by {BLOCK_VARIABLE}", "take it off that list"
        elif not own and allowed is not None and not any(provider.answers_to(name) for name in allowed):
            why = "not in the recipe's list of plugins", f"add {provider.plugin} to that list"
        elif not own and environment_only is not None and not any(provider.answers_to(n) for n in environment_only):
            why = f"not in {ALLOW_VARIABLE}", f"add {provider.plugin} to that list"
        if why is None:
            kept.append(candidate)
        else:
            reason, remedy = why
            registry.switched_off.append(SwitchedOffPlugin(provider=provider, reason=reason, remedy=remedy))
    return kept


def _load(candidate: Candidate, manager: pluggy.PluginManager, registry: PluginRegistry) -> None:
    provider = candidate.provider
    offered: dict[str, list[str]] = {}
    try:
        before, begun = set(sys.modules), time.process_time()
        module = _import(candidate)
        seconds = time.process_time() - begun
        slow = [f"imports {name}" for name in _HEAVY if name in sys.modules and name not in before]
        if not slow and seconds > _SLOW_IMPORT:
            slow = [f"takes {seconds:.1f} s of processor time to import"]
        _register(module, provider, manager)
        try:
            collected = _collect(module, provider, manager, offered)
        except PluginError:
            manager.unregister(module)
            raise
    except PluginError as error:
        registry.quarantined.append(QuarantinedPlugin(provider=provider, error=error, offered=offered))
        return
    for facet, items in collected:
        for item in items:
            registry.catalog(facet).add(item, provider)
    events = tuple(name for name in EVENTS if _implementation(manager, name, module) is not None)
    registry.plugins.append(
        LoadedPlugin(
            provider=provider,
            module=module,
            items={facet.kind: [item.name for item in items] for facet, items in collected},
            events=events,
            warnings=tuple(f"{what} when it is loaded, and every command waits for it" for what in slow),
        )
    )


def _broken(provider: Provider, what: str, hint: str | None = None) -> PluginError:
    return PluginError(
        f"plugin {provider.plugin!r} of {provider} {what}",
        hint=hint
        or f"report it to the authors of {provider.distribution}, or go without: --no-plugin {provider.plugin}",
    )


def _import(candidate: Candidate) -> Any:
    try:
        return candidate.load()
    # A plugin's module may fail in any way, even by exiting; none of it may take the command down with it.
    except (Exception, SystemExit) as error:
        raise _broken(
            candidate.provider,
            f"cannot be imported: {type(error).__name__}: {error} "
            f"({', '.join(filter(None, (f'entry point {candidate.reference}', line_of(error))))})",
        ) from error


def _register(module: Any, provider: Provider, manager: pluggy.PluginManager) -> None:
    """Register with pluggy, and refuse a plugin with a misspelt hook or without any."""
    try:
        name = manager.register(module, name=provider.plugin)
    except (ValueError, pluggy.PluginValidationError) as error:
        if manager.has_plugin(provider.plugin):  # pluggy registers hook by hook, and stops halfway
            manager.unregister(name=provider.plugin)
        raise _broken(provider, f"has a hook with a wrong signature: {error}") from error
    if name is None:
        raise _broken(provider, "is blocked")
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [caller.name for caller in manager.get_hookcallers(module) or [] if not caller.has_spec()]
        manager.unregister(module)
        known = [*(facet.hook for facet in FACETS), *EVENTS]
        near = [f"{each!r} ({did_you_mean(each, known) or 'no hook is named so'})" for each in unknown]
        raise _broken(provider, f"implements an unknown hook: {', '.join(near)}") from error
    if not manager.get_hookcallers(module):
        manager.unregister(module)
        bare = [each for each in dir(module) if each in {*(facet.hook for facet in FACETS), *EVENTS}]
        because = f"; {', '.join(bare)} lack the decorator hookimpl" if bare else ""
        raise _broken(provider, f"implements no hook{because}")


def _implementation(manager: pluggy.PluginManager, hook: str, module: Any) -> Callable[..., Any] | None:
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        if implementation.plugin is module:
            function: Callable[..., Any] = implementation.function
            return function
    return None


def _collect(
    module: Any, provider: Provider, manager: pluggy.PluginManager, offered: dict[str, list[str]]
) -> list[tuple[Facet, list[api.Item]]]:
    """Call the registration hooks of one plugin, once each, and check what they return."""
    collected: list[tuple[Facet, list[api.Item]]] = []
    problem: PluginError | None = None
    for facet in FACETS:
        function = _implementation(manager, facet.hook, module)
        if function is None:
            continue
        try:
            items = _call(function, facet, provider)
        except PluginError as error:
            # Going on tells which names the plugin would provide, for whoever asks for one of them.
            problem = problem or error
            continue
        offered[facet.kind] = [item.name for item in items]
        collected.append((facet, items))
    if problem is not None:
        raise problem
    return collected


def _call(function: Callable[..., Any], facet: Facet, provider: Provider) -> list[api.Item]:
    try:
        returned = function()
        if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping):
            returned = list(returned)
    except (Exception, SystemExit) as error:
        line = line_of(error)
        what = f"fails in {facet.hook}(): {type(error).__name__}: {error}" + (f" ({line})" if line else "")
        raise _broken(provider, what) from error
    expected = f"a list of draftsmith.api.{facet.type.__name__}"
    if not isinstance(returned, list):
        raise _broken(provider, f"returns {describe(returned)} from {facet.hook}(), expected {expected}")
    for item in returned:
        if not isinstance(item, facet.type):
            raise _broken(provider, f"returns a list with {describe(item)} from {facet.hook}(), expected {expected}")
        _check_options(item, facet, provider)
    names = [item.name for item in returned]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _broken(provider, f"registers the {facet.kind} {twice[0]!r} twice in {facet.hook}()")
    return returned


def _check_options(item: api.Item, facet: Facet, provider: Provider) -> None:
    """Options must be an attrs class whose fields all have a default: a recipe may leave any of them out."""
    options = getattr(item, "options", None)
    if options is None:
        return
    if not (isinstance(options, type) and attrs.has(options)):
        raise _broken(provider, f"gives the {facet.kind} {item.name!r} options that are not an attrs class")
    if facet.type is api.Loss:  # a loss may insist on an option, such as the terms of a sum
        return
    for each in attrs.fields(options):
        if each.init and each.default is attrs.NOTHING:
            raise _broken(provider, f"gives the {facet.kind} {item.name!r} the option {each.name!r} without a default")


def load_reference(reference: str, *, expected: type | None = None, provider: Provider | None = None) -> Any:
    """Import what ``"package.module:attribute"`` names.

    Args:
        reference: as in the values of :mod:`draftsmith.api`.
        expected: base class that the attribute must be a subclass of.
        provider: named in errors; looked up among the installed plugins where it is not given.

    Raises:
        PluginError: the module does not import, lacks the attribute, or it is of the wrong kind or lacks methods.
    """
    module_name, _, attribute = reference.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:
        failed = PluginError(
            f"{reference!r} of {provider or _provider_of(module_name)} cannot be loaded: "
            f"{type(error).__name__}: {error}",
            hint=missing_extra(error),
        )
        if failed.hint is not None:
            failed.exit_code = 2
        raise failed from error
    if expected is not None and not (isinstance(value, type) and issubclass(value, expected)):
        raise PluginError(
            f"{reference!r} of {provider or _provider_of(module_name)} is no subclass of "
            f"{expected.__module__}.{expected.__qualname__}",
            hint="report it to the authors of that distribution",
        )
    if expected is not None and (missing := sorted(getattr(value, "__abstractmethods__", ()))):
        raise PluginError(
            f"{reference!r} of {provider or _provider_of(module_name)} lacks methods of "
            f"{expected.__module__}.{expected.__qualname__}: {', '.join(missing)}",
            hint="report it to the authors of that distribution",
        )
    return value


def missing_extra(error: BaseException) -> str | None:
    """What to install where *error* is that of an import which an extra of draftsmith provides; None: it is not."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _TRAINING:
        return f"pip install '{api.PROJECT_NAME}[train]'"
    return None


def _provider_of(module_name: str) -> str:
    """Which installed plugin a module belongs to, by its top-level package."""
    package = module_name.partition(".")[0]
    for candidate in discover().candidates:
        if candidate.reference.partition(":")[0].partition(".")[0] == package:
            return str(candidate.provider)
    return f"package {package}"
