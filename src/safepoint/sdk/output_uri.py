"""The output folder of a `TransformersTrainer`, as Red Hat's SDK reads it."""

import re

from safepoint.storage.location import parse_location

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?(.*)", re.DOTALL)
_FORMS = "pvc://<claim>/<path>, s3://<bucket>/<prefix> or a path"
_NAMES = {"pvc": "claim", "s3": "bucket"}


def normalize_output_dir(text: str) -> str:
    """Check and normalize: scheme in lower case, no duplicate or trailing slashes; a path stays as it is.

    Raises:
        ValueError: another scheme, no bucket or claim, or an invalid location.
    """
    match = _SCHEME.fullmatch(text)
    if match is None:
        return text
    scheme, slashes, rest = match[1].lower(), match[2], match[3]
    if scheme not in _NAMES or slashes is None:
        raise ValueError(f"output_dir {text!r} has the scheme {scheme!r}, which is not supported; use {_FORMS}")
    if not rest.partition("/")[0]:
        raise ValueError(f"output_dir {text!r} names no {_NAMES[scheme]}; use {_FORMS}")
    try:
        return str(parse_location(f"{scheme}://{rest}"))
    except ValueError as error:
        raise ValueError(f"output_dir: {error}") from error
