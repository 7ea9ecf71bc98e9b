"""How fast the command line answers: ``--help``, a configuration error, and a whole recipe checked.

    python benchmarks/command_line.py [--rounds 20] [--recipe RECIPE.yaml]

One JSON line a case: seconds on the clock and of the processor, the best and the median of the rounds. An interpreter
that does nothing is measured beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measure(arguments: list[str], rounds: int, environment: dict[str, str]) -> tuple[list[float], list[float], int]:
    """Clock and processor seconds of each round, and the exit code."""
    clock, processor = [], []
    code = 0
    for _ in range(rounds + 1):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        code = subprocess.run(
            [sys.executable, *arguments], capture_output=True, env=environment, check=False
        ).returncode
        clock.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return clock[1:], processor[1:], code  # the first round compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recipe", help="also check this recipe (`draftsmith run RECIPE --check`)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong.yaml"
        wrong.write_text("verifier: nowhere\nalgorithm: none_such\noutput: out\nepochs: 3\n")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "cache")
        cases = {
            "bare interpreter": ["-c", "pass"],
            "--help": ["-m", "draftsmith", "--help"],
            "configuration error": ["-m", "draftsmith", "run", str(wrong)],
            "plugins list": ["-m", "draftsmith", "plugins", "list"],
        }
        if options.recipe:
            cases["recipe checked"] = ["-m", "draftsmith", "run", options.recipe, "--check"]
        for name, arguments in cases.items():
            clock, processor, code = measure(arguments, options.rounds, environment)
            line = {
                "case": name,
                "clock_s": round(min(clock), 4),
                "clock_median_s": round(statistics.median(clock), 4),
                "cpu_s": round(min(processor), 4),
                "cpu_median_s": round(statistics.median(processor), 4),
                "exit_code": code,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
