"""A compiler that compiles for no target: launches go to the interpreter."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend


class NeverCompiles(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError("kernels are interpreted")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> None:
        raise NotImplementedError("kernels are interpreted")

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError("kernels are interpreted")

    def get_module_map(self) -> dict[str, Any]:
        return {}
