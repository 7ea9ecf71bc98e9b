"""See the package."""

from torchvision import no_vision as pil_to_tensor

__all__ = ["pil_to_tensor"]
