"""Digests of what passes by on its way to a store."""

import contextlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safepoint.checkpoint.format.digest import FileDigest, FileDigester, digest_file
from safepoint.storage.store import Content, Sink

Result = Callable[[], FileDigest]
"""Gives the digest when all has passed; of a file it may wait, and raise OSError."""


@contextlib.contextmanager
def digesting(source: Path | Content) -> Generator[tuple[Path | Content, Result]]:
    """Digest what is uploaded within the block.

    Args:
        source: a file, which is read a second time beside its upload; or a stream, which passes by once.

    Yields:
        What to upload in its place, and its digest.
    """
    if isinstance(source, Content):
        yield _passing(source)
        return
    is_left = threading.Event()

    def go_on(count: int) -> None:
        if is_left.is_set():
            raise OSError(f"{source} is no longer read")

    with ThreadPoolExecutor(1, thread_name_prefix="safepoint-digest") as thread:
        try:
            yield source, thread.submit(digest_file, source, go_on).result
        finally:
            is_left.set()


def _passing(source: Content) -> tuple[Content, Result]:
    digesters: list[FileDigester] = []

    def pour(sink: Sink) -> None:
        digester = FileDigester()

        def take(block: memoryview) -> None:
            digester.update(block)
            sink(block)

        source.pour(take)
        digesters.append(digester)

    def result() -> FileDigest:
        return digesters[-1].result()

    return Content(size_bytes=source.size_bytes, pour=pour), result
