"""Values as people write them: times with units, sizes as Kubernetes writes them, and flags."""

import math
import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)
_BYTES = {"": 1, "k": 1000} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTPE", 1)
    for suffix, base in (("i", 1024), ("", 1000))
}

_FLAGS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off", ""), False)
_WHOLE = re.compile(r"[0-9]{1,18}")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)(m?)", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)", re.ASCII)


def parse_flag(variable: str, text: str) -> bool:
    """The value of an environment variable that is on or off.

    Raises:
        ValueError: the value is neither on nor off.
    """
    word = text.strip().lower()
    if word not in _FLAGS:
        raise ValueError(f"{variable}={text!r} must be 1 or 0")
    return _FLAGS[word]


def parse_whole(text: str) -> int | None:
    """The whole number in a text of ASCII digits; None for any other text, and for more than 18 digits.

    Use this for a text that another program or a person has written: int() raises a ValueError for more than 4,300
    digits.
    """
    return int(text) if _WHOLE.fullmatch(text) else None


def parse_duration(text: str) -> float:
    """The seconds in a time such as `90s`, `10m`, `1h30m`, `1.5h` or `2d`.

    Raises:
        ValueError: `text` is not a time, or has no unit.
    """
    if not _TIME.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not a time: write a number with s, m, h or d, such as 10m")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def parse_bytes(text: str | int) -> int:
    """The number of bytes in a size such as `8Gi` (8 * 1024³), `8G` (8 * 1000³) or `8192`; rounded up.

    Raises:
        ValueError: `text` is not a size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match[2] not in _BYTES:
        raise ValueError(
            f"{text!r} is not a size: write a number of bytes, or a number with Ki, Mi, Gi, Ti, k, M, G or T, such "
            "as 8Gi"
        )
    from decimal import Decimal  # not at the top: the import takes 7 ms, and most commands read no size

    return math.ceil(Decimal(match[1]) * _BYTES[match[2]])


def parse_count(quantity: str | float) -> int:
    """The number of processors or GPUs that a Kubernetes quantity requests: `4`, `"4"`, `"2500m"` or 2.5; rounded up.

    Raises:
        ValueError: `quantity` is not a quantity, or is negative.
    """
    match = _COUNT.fullmatch(str(quantity).strip())
    if match is None or isinstance(quantity, bool):
        raise ValueError(f"{quantity!r} is not a quantity: write a number such as 4, or thousandths such as 2500m")
    from decimal import Decimal

    return math.ceil(Decimal(match[1]) / (1000 if match[2] else 1))
