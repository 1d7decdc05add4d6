"""Makes safetensors files byte by byte, without the library, which the tested code does not use either."""

import json
from collections.abc import Mapping


def tensor_file(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A file for name → (dtype, shape, bytes)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body
