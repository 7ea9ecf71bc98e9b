"""The process that lends the store its memory. It holds no state of its own: what it dies with is lost.

Started by :mod:`draftsmith_hs_mooncake.supervisor` as ``python -m draftsmith_hs_mooncake.owner HOST MASTER SIZE
PROTOCOL DEVICE``. Samples survive the death of the processes that wrote them because none of those owns memory.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from draftsmith_hs_mooncake.installed import store_module

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    host, master, size, protocol, device = arguments
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before the store starts threads, which inherit it
    store = store_module().MooncakeDistributedStore()
    code = store.setup(host, "P2PHANDSHAKE", int(size), 0, protocol, device, master)
    if code != 0:
        print(f"the store refused a segment of {size} bytes (code {code})", file=sys.stderr)
        return 1
    signal.sigwait(ending)
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
