"""A driver that is never active: launches go to the interpreter."""

from __future__ import annotations

from typing import Any

from triton.backends.driver import DriverBase


class NeverActive(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("kernels are interpreted")

    def get_current_target(self) -> Any:
        raise NotImplementedError("kernels are interpreted")

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError("kernels are interpreted")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("kernels are interpreted")
