"""Seconds to recover from what befalls an online training: one JSON line a fault, from tests/test_online_faults.py.

    python benchmarks/online_faults.py [-k EXPRESSION]

`next_step_s`: from the fault to the next finished step, which may have been captured before it. `longest_pause_s`: the
longest wait for a step from the fault on, the time included for which something was frozen, full or not started again.
A step takes about 0.1 s there. Needs vLLM, unless `-k "not network and not endpoint"`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests" / "test_online_faults.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as pytest's: which faults")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-k", arguments.k, str(TESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            _, found, rest = line.partition('{"fault"')
            print(found + rest if found else line, end="", file=sys.stdout if found else sys.stderr, flush=True)
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
