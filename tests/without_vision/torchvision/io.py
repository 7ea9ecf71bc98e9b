"""See the package."""

from enum import Enum

from torchvision import no_vision as decode_image

__all__ = ["ImageReadMode", "decode_image"]


class ImageReadMode(Enum):
    RGB = 3
