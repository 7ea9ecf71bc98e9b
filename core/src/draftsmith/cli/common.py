"""What the commands have in common: options, loading a run, notes on plugins that were set aside."""

from __future__ import annotations

import argparse
import functools
import gc
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from draftsmith.errors import UserError, did_you_mean
from draftsmith.stages import STAGES, is_first_rank

if TYPE_CHECKING:
    from draftsmith.api import Command
    from draftsmith.config.resolve import ResolvedRun
    from draftsmith.plugins import PluginRegistry

__all__ = [
    "Parser",
    "Raw",
    "add_plugin_options",
    "add_recipe_options",
    "add_run_options",
    "at_least",
    "disabled",
    "load_run",
    "note",
    "number",
    "open_registry",
    "plugin_commands",
    "run_plugin_command",
    "run_stage",
]

#: Names given to ``--no-plugin`` before the command.
disabled: list[str] = []


class Raw(argparse.RawDescriptionHelpFormatter):
    """Descriptions and lists of commands are laid out already."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


class Parser(argparse.ArgumentParser):
    """Wrong arguments are errors like all others: what, where, what to do.

    Attributes:
        rest: name that all after ``--`` is kept under, for commands that pass it on; None: argparse's use of it.
    """

    def __init__(self, *, prog: str, **settings: object) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **settings)  # type: ignore[arg-type]
        self.rest: str | None = None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        if self.rest is None:
            return super().parse_args(given, namespace)
        end = given.index("--") if "--" in given else len(given)
        parsed = super().parse_args(given[:end], namespace)
        setattr(parsed, self.rest, given[end + 1 :])
        return parsed

    def error(self, message: str) -> NoReturn:
        hint = f"see `{self.prog} --help`"
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            wrong = message.removeprefix(prefix).split()[0].partition("=")[0]
            near = did_you_mean(wrong, self._option_string_actions)
            hint = f"{near} {hint}" if near else hint
        raise UserError(message, where=self.prog, hint=hint)


def number(kind: Callable[[str], Any], least: float, most: float = math.inf) -> Callable[[str], Any]:
    """What argparse reads a number in [least, most] with."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most:
            bound = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{text} is not {bound}")
        return value

    return read


def at_least(least: int) -> Callable[[str], Any]:
    """What argparse reads a whole number of at least *least* with."""
    return number(int, least)


def add_plugin_options(parser: argparse.ArgumentParser) -> None:
    """``--no-plugin`` and ``--debug``, which stand before or after the command."""
    parser.add_argument(
        "--no-plugin", metavar="NAME", action="append", default=[], help="do not load this plugin (repeatable)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def add_recipe_options(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """What every command that takes a recipe has; *optional*: it works without one."""
    parser.add_argument(
        "recipe", metavar="RECIPE", type=Path, nargs="?" if optional else None, help="YAML file that describes the run"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a value, such as train.epochs=5 (repeatable)",
    )
    add_plugin_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What every command that runs stages of a recipe has."""
    add_recipe_options(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="make stages anew whose stored output was made from other inputs"
    )
    parser.add_argument("--explain", action="store_true", help="print every value and where it came from, and stop")


def open_registry(
    no_plugin: Iterable[str] = (), *, only: Sequence[str] | None = None, raise_conflicts: bool = True
) -> PluginRegistry:
    """Load the plugins, less those switched off on the command line."""
    from draftsmith.plugins import load_plugins

    return load_plugins(disabled=[*disabled, *no_plugin], only=only, raise_conflicts=raise_conflicts)


def note(text: str) -> None:
    """A remark on stderr; of several processes of a run the first makes it."""
    if is_first_rank():
        print(f"note: {text}", file=sys.stderr)


def load_run(
    recipe: Path, overrides: Sequence[str] = (), no_plugin: Iterable[str] = (), stages: Sequence[str] = STAGES
) -> ResolvedRun:
    """Recipe, plugins and verifier, resolved and checked for the *stages* that are to run.

    Raises:
        ConfigError: with everything that is wrong.
    """
    from draftsmith.config.load import load_recipe
    from draftsmith.config.resolve import resolve
    from draftsmith.errors import ConfigError, DraftsmithError

    loaded = load_recipe(recipe, overrides, strict=False)
    try:
        registry = open_registry(no_plugin, only=loaded.recipe.plugins)
    except DraftsmithError as error:
        if not loaded.problems:
            raise
        raise ConfigError([*loaded.problems, *error.problems]) from error
    run = resolve(loaded, registry, stages)
    for remark in (*registry.notes, *run.notes):
        note(remark)
    for broken in registry.quarantined:
        note(f"plugin {broken.name!r} of {broken.provider} is set aside: {broken.reason}")
    return run


def run_stage(stage: str, arguments: argparse.Namespace) -> None:
    """The body of the commands that run one stage."""
    run_stages([stage], arguments)


def run_stages(stages: Sequence[str], arguments: argparse.Namespace) -> None:
    """Resolve, then explain or run."""
    run = load_run(arguments.recipe, arguments.overrides, arguments.no_plugin, stages)
    if arguments.explain:
        if not is_first_rank():
            return
        from draftsmith.cli.explain import print_explanation

        print_explanation(run)
        return
    from rich.console import Console

    from draftsmith.pipeline import run_all

    gc.enable()
    run_all(run, Console(), overwrite=arguments.overwrite, stages=stages)


@functools.cache
def plugin_commands() -> tuple[Command, ...]:
    """Commands that plugins add. Asked for by the help, and for a name that the core does not have."""
    registry = open_registry(raise_conflicts=False)
    return tuple(registry.commands.uncontested())


def run_plugin_command(item: Command, arguments: Sequence[str]) -> None:
    """Wrap a plugin's function with typer, or take its group of them, and call it."""
    import typer

    from draftsmith.plugins import load_reference

    implementation = load_reference(item.implementation)
    gc.enable()
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(implementation, typer.Typer):
        app.info.no_args_is_help = True
        app.callback(help=item.summary)(lambda: None)  # with it, a single command stays a command of a group
        for each in implementation.registered_commands:
            if each.callback is not None:
                app.command(each.name, help=each.help or each.callback.__doc__)(_guarded(each.callback))
    else:
        app.command(item.name, help=implementation.__doc__ or item.summary)(_guarded(implementation))
    app(args=list(arguments), prog_name=f"draftsmith {item.name}")


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """*function* with signals handled inside of typer, which would turn one into an exit of its own. What is kept,
    the plugin knows."""
    from draftsmith.cli.signals import clean_end

    @functools.wraps(function)
    def guarded(*positional: Any, **named: Any) -> Any:
        with clean_end():
            return function(*positional, **named)

    return guarded
