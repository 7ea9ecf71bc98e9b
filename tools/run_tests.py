#!/usr/bin/env python3
"""Run the whole test suite in three parts, and close with one line for all.

Tests on tiny models run in parallel, one thread each: first the fast ones, then, as far as memory allows, those that
are slow or start vLLM. What needs the real model, or the machine to itself, runs last, one after another with all
cores. Further arguments go to every part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "tests"
HEAVY = "slow or vllm or model"
ALONE = "alone or model"
#: These need another environment, see run_peer_tests.py.
ELSEWHERE = "peer"
#: pytest's exit code where nothing was collected, which is fine for one of the parts.
NO_TESTS = 5
#: What a heavy test may take, with its worker and all that it starts.
HEAVY_GIBIBYTES = 6
#: vLLM binds its threads to the same cores in every process, and two would share them.
HEAVY_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def workers() -> int:
    """One per core; more than eight gain nothing on this suite."""
    return max(1, min(8, os.cpu_count() or 1))


def heavy_workers() -> int:
    """As many as :func:`workers`, or as this machine's memory holds."""
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max(1, min(workers(), gibibytes // HEAVY_GIBIBYTES))


def parts(fast_only: bool) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name → (pytest's arguments, environment) of each part."""
    fast = [*in_parallel(workers()), "-m", f"not ({HEAVY} or {ELSEWHERE})"]
    chosen: dict[str, tuple[list[str], dict[str, str]]] = {"fast": (fast, {"OMP_NUM_THREADS": "1"})}
    if not fast_only:
        heavy = [*in_parallel(heavy_workers()), "-m", f"({HEAVY}) and not ({ALONE} or {ELSEWHERE})"]
        chosen["heavy"] = (heavy, HEAVY_ENVIRONMENT)
        chosen["alone"] = (["-m", f"({HEAVY}) and ({ALONE}) and not {ELSEWHERE}"], {})
    return chosen


def in_parallel(count: int) -> list[str]:
    """pytest's arguments for *count* processes. The tests of a file share one, and with it what they prepare."""
    return ["-n", str(count), "--dist", "loadfile"]


def run_part(name: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, Path]:
    """Run one part. Returns pytest's exit code, and where its report lies."""
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    print(f"\n── {name} tests: {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "--durations=10", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
    return done.returncode, report


def counts(report: Path) -> dict[str, int]:
    """What a JUnit report counted; all zero where pytest died before writing it."""
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            for key in total:
                total[key] += int(suite.get(key, "0"))
    return total


def closing_line(totals: list[dict[str, int]]) -> str:
    """``N passed, N failed[, N skipped]`` over all parts."""
    summed = {key: sum(total[key] for total in totals) for key in ("tests", "failures", "errors", "skipped")}
    failed = summed["failures"] + summed["errors"]
    passed = summed["tests"] - failed - summed["skipped"]
    line = f"{passed} passed, {failed} failed"
    return line + (f", {summed['skipped']} skipped" if summed["skipped"] else "")


def main(arguments: list[str]) -> int:
    begun = time.monotonic()
    fast_only = "--fast" in arguments
    further = [argument for argument in arguments if argument != "--fast"]
    REPORTS.mkdir(parents=True, exist_ok=True)
    codes, totals = [], []
    for name, (options, environment) in parts(fast_only).items():
        code, report = run_part(name, [*options, *further], environment)
        codes.append(code)
        totals.append(counts(report))
    print(f"\nall tests, in {(time.monotonic() - begun) / 60:.1f} minutes:")
    print(closing_line(totals), flush=True)
    if sum(total["tests"] for total in totals) == 0:
        return NO_TESTS
    return max(code for code in codes if code != NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
