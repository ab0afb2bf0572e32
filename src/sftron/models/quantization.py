"""Quantization with bitsandbytes, which needs no compiler and runs on CPUs and GPUs. It is imported when it is used."""

from types import ModuleType


def import_bitsandbytes(setting: str) -> ModuleType:
    """Returns the package bitsandbytes, or raises ValueError with the setting that needs it and the pip command."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            f"{setting} needs the package bitsandbytes, which cannot be imported ({error}): pip install 'sftron[quant]'"
        ) from error
    return bitsandbytes
