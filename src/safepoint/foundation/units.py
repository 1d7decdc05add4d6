"""Sizes, durations and counts as text for people, and a counter for progress lines."""

from collections.abc import Callable, Collection

_KILO = 1000.0
_MOST_COMPARED = 200


def format_bytes(size_bytes: int) -> str:
    """A size in decimal units, as disks and object stores state it: `1.2 GB`, `340 kB`, `12 B`."""
    if size_bytes < _KILO:
        return f"{size_bytes} B"
    value = float(size_bytes)
    unit = "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007  the unit reached is what is printed
        value /= _KILO
        if round(value) < _KILO:  # rounded as it is printed: 999.6 MB are 1.0 GB
            break
    return f"{value:.0f} {unit}" if round(value, 1) >= 100 else f"{value:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """A duration: `0.12 s`, `48 s`, `2 m 10 s`, `3 h 05 m`; `0.00 s` if negative, as after a clock was set back."""
    seconds = max(0.0, seconds)
    if round(seconds, 2) < 10:  # rounded as it is printed: 9.996 s are 10 s
        return f"{seconds:.2f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m"


def format_age(seconds: float) -> str:
    """How long ago, roughly: `12 s`, `5 m`, `3 h`, `9 d`; a time in the future is `0 s`."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 1:.0f} s"


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 file`, `3 files`, `2 batches`, `2 processes`."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}es" if noun.endswith(("ch", "ss")) else f"{count} {noun}s"


def nearest(word: str, known: Collection[str]) -> str:
    """A hint for an unknown `word`: the known word that is most similar to it, or a list of all known words."""
    similar = most_similar(word, known)
    return f"did you mean {similar}?" if similar else f"there are {', '.join(sorted(known))}"


def most_similar(word: str, known: Collection[str]) -> str:
    """The known word that is most similar to `word`; empty if no known word is similar."""
    from difflib import get_close_matches

    matches = get_close_matches(word[:_MOST_COMPARED], known, n=1)
    return matches[0] if matches else ""


class ByteCounter:
    """Counts bytes for a progress line.

    Args:
        progress: called with the number of bytes done so far and `total_bytes`; may be None.
        total_bytes: how many bytes there are.
    """

    def __init__(self, progress: Callable[[int, int], None] | None, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self.done_bytes = 0

    def add(self, count: int) -> None:
        """Count `count` more bytes. Only one thread at a time may call this."""
        self.done_bytes += count
        if self._progress is not None:
            self._progress(self.done_bytes, self._total_bytes)
