"""The names of experts, as they are shown."""

from __future__ import annotations

from collections.abc import Sequence


def expert_names(mixtures: Sequence[int]) -> list[str]:
    """Return a name for each expert: its number, after that of its mixture if there are several."""
    numbers: dict[int, int] = {}
    names = []
    for mixture in mixtures:
        number = numbers.get(mixture, 0)
        numbers[mixture] = number + 1
        names.append(f"{mixture}.{number}")
    return names if len(numbers) > 1 else [name.split(".")[1] for name in names]


def names_in_short(names: Sequence[str]) -> str:
    """Return names with those that follow each other in short, such as `0-3, 6`."""
    parts: list[list[str]] = []
    for name in names:
        prefix, number = _split(name)
        if parts and _split(parts[-1][-1]) == (prefix, number - 1):
            parts[-1].append(name)
        else:
            parts.append([name])
    return ", ".join(
        part[0] if len(part) == 1 else f"{part[0]}-{_split(part[-1])[1]}" for part in parts
    )


def _split(name: str) -> tuple[str, int]:
    prefix, _, number = name.rpartition(".")
    return prefix, int(number)
