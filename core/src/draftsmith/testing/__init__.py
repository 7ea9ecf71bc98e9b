"""The conformance kit: base classes of tests for plugins, and the tiny verifiers that they run on.

:mod:`draftsmith.testing.algorithm`, :mod:`~draftsmith.testing.losses`, :mod:`~draftsmith.testing.masks`,
:mod:`~draftsmith.testing.transport` and :mod:`~draftsmith.testing.plugin` hold the tests, and
:mod:`~draftsmith.testing.check` puts an installed plugin to them by name (``draftsmith plugins check``).
"""

from __future__ import annotations

import sys

# A failing test then shows both sides of its comparison, in the author's own test run too.
if "pytest" in sys.modules:
    _KIT = ("algorithm", "losses", "masks", "plugin", "training", "transport")
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{each}" for each in _KIT))
