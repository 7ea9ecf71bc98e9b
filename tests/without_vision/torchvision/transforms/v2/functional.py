"""See the package."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
