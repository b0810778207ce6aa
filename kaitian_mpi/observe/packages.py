"""Whether the packages that sinks need are installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from kaitian_mpi.errors import UserError


def check_package(flag: str, name: str, module: str = "") -> None:
    """Check that a package is installed.

    Args:
        flag: the flag that needs it.
        name: the name of the package, and of the extra that installs it.
        module: a module of the package to import now, which may take seconds; empty for none.

    Raises:
        UserError: it is not installed, or cannot be imported.
    """
    advice = f"pip install 'kaitian-mpi[{name}]', or leave out {flag}"
    if find_spec(name) is None:
        raise UserError(
            f"{flag}: the package {name} is not installed, and is needed on every host; {advice}"
        )
    if not module:
        return
    try:
        import_module(module)
    except Exception as error:  # a broken installation raises anything
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{flag}: the package {name} cannot be imported: {type(error).__name__}: {reason}; "
            f"{advice}"
        ) from error
