"""Checkpoints that another program wrote by torch.save, without running any code of theirs."""

from __future__ import annotations

import argparse
import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from trainer.errors import ConfigError

# What may stand in one besides tensors and plain containers: the flags of a program, and numbers
# of numpy, whose reader has another name in numpy 1.
_SCALAR = np._core.multiarray.scalar  # pyright: ignore[reportAttributeAccessIssue]
_ALLOWED = [
    argparse.Namespace,
    np.dtype,
    *(type(np.dtype(name)) for name in ("f4", "f8", "i4", "i8")),
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
]


def unpickle(file: Path) -> Any:
    """The content of a file that torch.save wrote.

    It may hold tensors, plain containers, numbers of numpy and argparse.Namespace. ConfigError for
    anything else.
    """
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
    except UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        more = f" (it asks for {match[1]})" if match else ""
        raise ConfigError(
            f"{file}: refused. Got a file of more than tensors and argparse.Namespace{more}, which "
            "could run code, or no file of torch.save at all. Save it again from the program that "
            "made it, with tensors alone."
        ) from None
    except Exception as error:
        # every exception: bytes that are no pickle can make the unpickler fail in any way
        raise ConfigError(
            f"{file}: cannot be read ({error}). Copy the checkpoint again."
        ) from error
