"""A stand-in for torchvision: SGLang imports it for images, which these tests do not have."""

from absent import absent, stand_in_for_submodules

__version__ = "0.0.0+standin"

stand_in_for_submodules(__name__)


def __getattr__(name: str) -> object:
    return absent(__name__, name)
