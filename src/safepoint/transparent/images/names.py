"""The names of images and of their parts. This module imports only the standard library."""

import re

MOST_NUMBER = 10**9 - 1
"""The highest number that the name of an image can have."""
_IMAGE_NAME = re.compile(r"image-([1-9][0-9]{0,8})")


def image_name(number: int) -> str:
    """The name of an image's folder."""
    return f"image-{number}"


def number_of(name: str) -> int | None:
    """The number in the name of an image; None if `name` is not the name of an image."""
    match = _IMAGE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def part_name(number: int) -> str:
    """The name of the folder of a part."""
    return f"part-{number}"
