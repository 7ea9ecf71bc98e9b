"""Write one HTML file about runs and evaluations: it holds all that it shows, and loads nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from draftsmith.cli import common

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", metavar="FOLDER", nargs="+", type=Path, help="a run's output, or an evaluation")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("report.html"), help="default: report.html"
    )
    parser.add_argument(
        "--show", metavar="N", type=common.at_least(0), default=5, help="answers that gained least; default: 5"
    )
    common.add_plugin_options(parser)


def execute(arguments: argparse.Namespace) -> None:
    from draftsmith.report.build import build_report
    from draftsmith.stages import write_text_atomically

    text = build_report(arguments.sources, worst=arguments.show)
    write_text_atomically(arguments.output, text)
    print(f"written: {arguments.output}")
