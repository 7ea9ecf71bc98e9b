"""vLLM's model runner V2 on a CPU: its Triton kernels run in Triton's interpreter.

Put the folder above this package on PYTHONPATH and set TRITON_INTERPRET=1. vLLM then finds a Triton backend named
``cpu``, without which it falls back to model runner V1 on a CPU; nothing is ever compiled by it. vLLM also calls
:func:`mend_interpreter` in each of its processes, which puts two things right that keep its kernels from running.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["mend_interpreter"]


def mend_interpreter() -> None:
    """Mend Triton's interpreter in this process; does nothing where kernels are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        # A comparison that was splatted keeps the integer type of what was compared.
        return interpreter.TensorHandle(np.asarray(mask.data).astype(bool), interpreter.tl.int1)

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(self, ptrs, boolean(mask), *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, value, boolean(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    # Tensors are on the host already: the copies to it and back would move whole key-value caches at each launch.
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, args, args_host, kwargs, kwargs_host: None
