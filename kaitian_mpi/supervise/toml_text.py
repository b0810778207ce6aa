"""TOML files of the user's. Pure."""

from __future__ import annotations

import tomllib
from typing import Any

from kaitian_mpi.errors import UserError


def parse_toml(content: bytes | str, source: str) -> dict[str, Any]:
    """Parse the content of a TOML file.

    Args:
        content: its bytes or text.
        source: the flag and the file, for the error message.

    Raises:
        UserError: it is not TOML, or not UTF-8.
    """
    try:
        return tomllib.loads(content.decode() if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as error:
        fault = " ".join(str(error).split())
        raise UserError(f"{source}: found no valid TOML ({fault}); correct it") from error
