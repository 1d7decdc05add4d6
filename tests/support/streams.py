"""Streams of bytes to upload."""

from safepoint.storage.store import Content, Sink

_BLOCK_BYTES = 3_000_001


def stream_of(data: bytes, block_bytes: int = _BLOCK_BYTES) -> Content:
    """`data` in blocks of one buffer, which is overwritten as soon as the caller has returned."""

    def write_to(sink: Sink) -> None:
        buffer = bytearray(block_bytes)
        for begin in range(0, len(data), block_bytes):
            block = data[begin : begin + block_bytes]
            buffer[: len(block)] = block
            sink(memoryview(buffer)[: len(block)])
            buffer[:] = bytes(block_bytes)

    return Content(size_bytes=len(data), write_to=write_to)


__all__ = ["stream_of"]
