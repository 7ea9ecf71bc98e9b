"""Show what is installed and what each plugin offers; begin a plugin of your own, and check one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli import common
from draftsmith.plugins.manager import FACETS
from draftsmith.plugins.scaffold import KINDS

if TYPE_CHECKING:
    from draftsmith.plugins import PluginRegistry, Provider

__all__ = ["configure", "describe_options", "execute", "overview", "unknown"]


def configure(parser: argparse.ArgumentParser) -> None:
    common.add_plugin_options(parser)
    commands = parser.add_subparsers(dest="action", metavar="list | show | new | check", required=True)
    listing = commands.add_parser("list", prog="draftsmith plugins list", help="every plugin, and why one is not used")
    listing.add_argument("--json", action="store_true", help="as JSON")
    showing = commands.add_parser("show", prog="draftsmith plugins show", help="one plugin or item, with its options")
    showing.add_argument("name", metavar="NAME", help="a plugin, or something that a plugin provides")
    beginning = commands.add_parser(
        "new", prog="draftsmith plugins new", help="write the package of a plugin of your own"
    )
    beginning.add_argument("name", metavar="NAME", help="of the algorithm, loss, mask or transport, such as my_idea")
    beginning.add_argument("--kind", choices=KINDS, required=True, help="what it is")
    beginning.add_argument("--folder", type=Path, help="where to write it; by default ./draftsmith-NAME")
    checking = commands.add_parser("check", prog="draftsmith plugins check", help="put one to the conformance kit")
    checking.add_argument("name", metavar="NAME", help="a plugin, or an algorithm, loss, mask or transport")
    checking.add_argument("--details", action="store_true", help="show the traceback of each check that fails")
    for each in (listing, showing, beginning, checking):
        each.add_argument("--no-plugin", metavar="NAME", action="append", default=[], dest="also_off")
        each.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def execute(arguments: argparse.Namespace) -> int:
    registry = common.open_registry([*arguments.no_plugin, *arguments.also_off], raise_conflicts=False)
    if arguments.action == "new":
        begin(registry, arguments.name, arguments.kind, arguments.folder)
    elif arguments.action == "check":
        from draftsmith.cli.check import check

        return check(registry, arguments.name, details=arguments.details)
    elif arguments.action == "show":
        print_one(registry, arguments.name)
    elif arguments.json:
        import json

        print(json.dumps(overview(registry), indent=2, ensure_ascii=False))
    else:
        print_all(registry)
    return 0


def begin(registry: PluginRegistry, name: str, kind: str, folder: Path | None) -> None:
    """Write the package of a new plugin, and say what to do with it.

    Raises:
        UserError: the name is taken, or cannot be one.
        OutputError: the folder is there already, or cannot be written.
    """
    from draftsmith.errors import UserError
    from draftsmith.plugins.manager import distribution_of
    from draftsmith.plugins.scaffold import check_name, write_package

    check_name(name)  # a name that none can have is not told to be taken
    catalog = next(registry.catalog(each) for each in FACETS if each.kind == kind)
    if name in catalog:
        raise UserError(
            f"the {kind} {name!r} is there already, of {catalog.provider(name)}", hint="choose another name"
        )
    # The installed package of that name would make way for the new one, or both claim one name.
    for provider in registry.providers:
        if provider.answers_to(name) or provider.answers_to(distribution_of(name)):
            raise UserError(
                f"the plugin {provider.plugin!r} is there already, of {provider}", hint="choose another name"
            )
    written, *files = write_package(name, kind, folder)
    for path in files:
        print(written / path)
    print(f"\nnow: pip install -e '{written.resolve()}[test]'")
    print(f"then: draftsmith plugins check {name}, or pytest {written}")


def print_all(registry: PluginRegistry) -> None:
    """Every plugin with its version and items, and why one is not in use."""
    for plugin in registry.plugins:
        print(f"{plugin.name}  ({plugin.provider})")
        for kind, names in plugin.items.items():
            print(f"    {kind + ':':<20}{', '.join(names)}")
        if plugin.events:
            print(f"    {'observes:':<20}{', '.join(each.removeprefix('draftsmith_') for each in plugin.events)}")
        for warning in plugin.warnings:
            print(f"    {'warning:':<20}{warning}")
    aside: list[tuple[str, str, Provider, str]] = [
        *(("quarantined", each.name, each.provider, each.reason) for each in registry.quarantined),
        *(("switched off", each.name, each.provider, each.reason) for each in registry.switched_off),
        *(("other API", each.provider.plugin, each.provider, each.reason) for each in registry.foreign),
    ]
    for state, name, provider, reason in aside:
        print(f"{name}  ({provider})  {state}: {reason}")
    for remark in registry.notes:
        print(f"note: {remark}")
    for conflict in registry.conflicts:
        print(f"conflict: {conflict}")


def print_one(registry: PluginRegistry, name: str) -> None:
    """A plugin, or an algorithm, loss, transport … by name: what it is, and its options."""
    shown: set[tuple[str, str]] = set()
    plugins = [each for each in registry.plugins if each.provider.answers_to(name)]
    for plugin in plugins:
        print(f"plugin {plugin.name}  ({plugin.provider})\n")
    for facet in FACETS:
        catalog = registry.catalog(facet)
        items = [item for plugin in plugins for item in catalog.of(plugin.provider)]
        if name in catalog and name not in [item.name for item in items]:
            items.append(catalog.get(name))
        for item in items:
            if (facet.kind, item.name) not in shown:
                shown.add((facet.kind, item.name))
                _show_item(facet.kind, item, catalog.provider(item.name))
    if not plugins and not shown:
        raise unknown(name, registry)


def _show_item(kind: str, item: Any, provider: Provider) -> None:
    print(f"{kind} {item.name}  ({provider})")
    print(f"    {item.summary}")
    for facet in ("architecture", "loss", "mask", "schema"):
        if kind == "algorithm":
            given = f" {json.dumps(dict(item.loss_options))}" if facet == "loss" and item.loss_options else ""
            print(f"    {facet + ':':<16}{getattr(item, facet)}{given}")
    if kind == "transport":
        kept = [
            each for each in ("persistent", "random_access", "concurrent_writers") if getattr(item.guarantees, each)
        ]
        print(f"    {'guarantees:':<16}{', '.join(kept) or 'none'}")
    options = getattr(item, "options", None)
    if options is not None:
        print("    options:")
        for option in describe_options(options):
            required = "required" if option["required"] else f"default {option['default']}"
            print(f"        {option['name']}: {option['type']}, {required}")
            if option["help"]:
                print(f"            {option['help']}")
    print()


def describe_options(options: type) -> list[dict[str, Any]]:
    """Name, type, default and description of each field of an options class."""
    import attrs

    from draftsmith.config.structure import describe_type, field_types, plain

    kinds = field_types(options)
    described = []
    for each in attrs.fields(options):
        if not each.init:
            continue
        default: Any = each.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = "computed" if default.takes_self else default.factory()
        required = default is attrs.NOTHING
        described.append(
            {
                "name": each.alias or each.name,
                "type": describe_type(kinds.get(each.name, Any)),
                "required": required,
                "default": None if required else _yaml(plain(default)),
                "help": each.metadata.get("help", ""),
            }
        )
    return described


def _yaml(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value


def unknown(name: str, registry: PluginRegistry) -> Exception:
    """The error for a name that no plugin and no item has: what there is, or why the plugin is not in use."""
    from draftsmith.errors import DraftsmithError, UnknownNameError
    from draftsmith.plugins.manager import distribution_of

    try:
        registry.require(name)
    except UnknownNameError:
        known = {each.name for each in registry.plugins}
        for facet in FACETS:
            known.update(registry.catalog(facet).names())
        hint = f"where its plugin is not installed: pip install {distribution_of(name)}; see `draftsmith plugins list`"
        return UnknownNameError("plugin or item", name, sorted(known), hint=hint)
    except DraftsmithError as error:
        return error
    return UnknownNameError("plugin", name, [])


def overview(registry: PluginRegistry) -> dict[str, Any]:
    """What ``plugins list --json`` prints."""

    def who(provider: Provider) -> dict[str, str]:
        return {"plugin": provider.plugin, "distribution": provider.distribution, "version": provider.version}

    return {
        "plugins": [
            {
                **who(each.provider),
                "items": {kind: list(names) for kind, names in each.items.items()},
                "events": list(each.events),
                "warnings": list(each.warnings),
            }
            for each in registry.plugins
        ],
        "quarantined": [{**who(each.provider), "reason": each.reason} for each in registry.quarantined],
        "switched_off": [{**who(each.provider), "reason": each.reason} for each in registry.switched_off],
        "other_api": [{**who(each.provider), "reason": each.reason} for each in registry.foreign],
        "notes": registry.notes,
        "conflicts": [each.what for each in registry.conflicts],
    }
