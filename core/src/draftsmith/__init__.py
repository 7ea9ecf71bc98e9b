"""Train draft models for speculative decoding, and write checkpoints that vLLM loads as they are.

The core knows how to run the job; algorithms and hidden-state transports are plugins (see :mod:`draftsmith.api`,
:mod:`draftsmith.interfaces`, :mod:`draftsmith.hookspecs`). Importing this package imports no torch.
"""

__version__ = "0.1.0"
