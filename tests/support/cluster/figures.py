"""A table of what tests have measured."""

import statistics
from collections import defaultdict


class Figures:
    """What tests have measured, by case and by what it is."""

    def __init__(self) -> None:
        self._found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, case: str, **values: float) -> None:
        """Add what one test has measured."""
        for name, value in values.items():
            self._found[case][name].append(value)

    def table(self) -> list[str]:
        """The lines of a table: for each case and figure, median, minimum, maximum and number."""
        names = list(dict.fromkeys(name for found in self._found.values() for name in found))
        lines = [f"| case | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"] if names else []
        for case, found in self._found.items():
            lines.append(f"| {case} | {' | '.join(_cell(found[name]) for name in names)} |")
        return lines


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    middle, least, most = (
        f"{value:.1f}".removesuffix(".0") for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({least} to {most}, {len(values)} times)"
