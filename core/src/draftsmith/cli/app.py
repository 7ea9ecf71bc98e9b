"""Which commands there are, each imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from draftsmith import __version__
from draftsmith.cli import common
from draftsmith.cli.signals import clean_end
from draftsmith.errors import UnknownNameError, mark_shared
from draftsmith.stages import process_count

__all__ = ["COMMANDS", "dispatch"]

#: name → summary. The module of a command is ``draftsmith.cli.NAME`` (with ``_`` for a space), with
#: ``configure(parser)`` and ``execute(arguments)``. The table spares importing all of them to print the help.
COMMANDS = {
    "run": "do the whole job: prepare, capture, train, export, verify",
    "prepare": "conversations to token ids, loss mask and vocabulary map",
    "capture": "hidden states of the verifier, through a transport",
    "capture serve": "start a vLLM server that captures for training on other hosts",
    "train": "train the draft; a killed run goes on where it stopped",
    "export": "write the checkpoint that vLLM serves",
    "verify": "serve the checkpoint in vLLM; compare with the verifier alone and the simulator",
    "evaluate": "measure a draft side by side with other methods, in vLLM",
    "report": "write one HTML file about runs and evaluations",
    "serve": "serve a checkpoint with vLLM, after checking it",
    "watch": "watch running vLLM servers: is the draft still worth it?",
    "lint": "check a checkpoint against vLLM's loader, without starting it",
    "plugins": "show what is installed and what each plugin offers; begin one, and check one",
    "doctor": "look at Python, torch, vLLM, devices and plugins, and say what to mend",
}

_DESCRIPTION = "Train draft models for speculative decoding; vLLM serves the result as it is."


def dispatch(given: Sequence[str]) -> int:
    """Parse the options before the command, then hand over to the command; returns the exit code."""
    ahead, rest = _split(given)
    root = common.Parser(
        prog="draftsmith",
        usage="draftsmith [--version] [--no-plugin NAME] [--debug] COMMAND …",
        description=_DESCRIPTION,
        formatter_class=common.Raw,
        add_help=False,
    )
    root.add_argument("-h", "--help", action="store_true", help="show this help; `draftsmith COMMAND --help` for one")
    root.add_argument("--version", action="version", version=f"draftsmith {__version__}")
    common.add_plugin_options(root)
    options = root.parse_args(ahead)
    common.disabled[:] = options.no_plugin
    common.plugin_commands.cache_clear()
    if options.help or not rest:
        root.epilog = _command_list()
        root.print_help()
        return 0 if options.help else 2
    with clean_end("what was complete is kept: the same command goes on where it stopped"):
        return _run(rest[0], rest[1:])


def _split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of the root, and the command with all that follows it."""
    index = 0
    while index < len(given) and given[index].startswith("-"):
        index += 2 if given[index] == "--no-plugin" else 1
    return list(given[:index]), list(given[index:])


#: Commands that torchrun may start.
_SHARED = ("train",)


def _run(name: str, arguments: Sequence[str]) -> int:
    if arguments and f"{name} {arguments[0]}" in COMMANDS:  # a recipe of that name is ./NAME
        name, arguments = f"{name} {arguments[0]}", arguments[1:]
    if name not in _SHARED and process_count() > 1:
        from draftsmith.pipeline import only_training_is_shared

        raise mark_shared(only_training_is_shared(process_count()))
    if name in COMMANDS:
        module = importlib.import_module(f"draftsmith.cli.{name.replace(' ', '_')}")
        parser = common.Parser(prog=f"draftsmith {name}", description=module.__doc__, formatter_class=common.Raw)
        module.configure(parser)
        code = module.execute(parser.parse_args(arguments))
        return int(code or 0)
    for item in common.plugin_commands():
        if item.name == name:
            common.run_plugin_command(item, arguments)
            return 0
    known = [*COMMANDS, *(each.name for each in common.plugin_commands())]
    raise UnknownNameError("command", name, known, hint="see `draftsmith --help`")


def _command_list() -> str:
    added = common.plugin_commands()
    width = max(len(name) for name in [*COMMANDS, *(each.name for each in added)])
    lines = ["commands:", *(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())]
    if added:
        lines += ["", "commands of plugins:", *(f"  {each.name:<{width}}  {each.summary}" for each in added)]
    return "\n".join(lines)
