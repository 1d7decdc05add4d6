"""From memory to files: the content, its digest, archives' checksums, with O_DIRECT and without."""

import errno
import io
import os
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.checkpoint.format.digest import PART_BYTES, digest_file
from safepoint.snapshot.images.image import Image
from safepoint.snapshot.images.torch_image import TorchImages
from safepoint.snapshot.keeper.persist import file_writer
from safepoint.snapshot.keeper.persist.file_writer import GivenUpError, Source, digest_source, write_files
from safepoint.snapshot.memory.block import PAGE_BYTES, Block
from tests.support.snapshots import ENDLESS, fill, same, source_of

MB = 1 << 20
SIZES = [0, 1, 4095, 4096, 4097, MB - 1, MB, MB + 1, 4 * MB, 5 * MB + 7]


def made(path: str, size: int, *, offset: int = 0, content: bytes | None = None, **changed: Any) -> Source:
    """A file's image with content that shows every displacement."""
    content = bytes(os.urandom(min(size, 8191)) * (size // 8191 + 1))[:size] if content is None else content
    block = Block.allocate(1, offset + size)
    block.write(offset, content)
    return source_of(Image.of_bytes(path, content), block, offset, **changed)


def content_of(source: Source) -> bytes:
    return bytes(source.view(0, source.size_bytes))


def check(sources: list[Source], folder: Path) -> None:
    """Write them, and compare with what is in memory."""
    entries = {entry.path: entry for entry in write_files(sources, folder)}
    assert len(entries) == len(sources)
    for source in sources:
        path = folder / source.path
        assert path.read_bytes() == content_of(source)
        digest = digest_file(path)
        entry = entries[source.path]
        assert (entry.size_bytes, entry.digest, entry.parts) == (digest.size_bytes, digest.digest, digest.parts)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="safepoint-test-") as place:
        yield Path(place)


@pytest.mark.parametrize("offset", [0, 64])
def test_every_size(folder: Path, offset: int) -> None:
    """Small ones and large ones, in folders, from the beginning of a block and from within."""
    check([made(f"sub/{size}/file", size, offset=offset) for size in SIZES], folder)


def test_a_file_of_several_parts(tmp_path: Path) -> None:
    """One byte more than a part has."""
    check([made("large", PART_BYTES + 1)], tmp_path)


def test_one_that_shrank_in_its_block(tmp_path: Path) -> None:
    """The rest of its last page is not what was there before."""
    source = made("first", 3 * MB)
    source.block.fit(2 * MB + 5)
    check([source_of(Image.of_bytes("second", bytes(source.view(0, 2 * MB + 5))), source.block)], tmp_path)


class Refusing:
    """A file system that takes no direct writes: it says so when a file is opened, or only when it is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, when: str, code: int) -> None:
        self.refused = 0
        opening, pwrite = os.open, os.pwrite
        direct: set[int] = set()

        def open_(path: Any, flags: int, mode: int = 0o777, **other: Any) -> int:
            if not flags & os.O_DIRECT:
                return opening(path, flags, mode, **other)
            descriptor = opening(path, flags & ~os.O_DIRECT, mode, **other)
            if when == "opening":
                os.close(descriptor)  # the file is there, as some systems leave it
                self.refused += 1
                raise OSError(code, os.strerror(code))
            direct.add(descriptor)
            return descriptor

        def pwrite_(descriptor: int, data: Any, offset: int) -> int:
            if descriptor in direct and (when == "writing" or offset >= 4 * MB):
                direct.discard(descriptor)
                self.refused += 1
                raise OSError(code, os.strerror(code))
            return pwrite(descriptor, data, offset)

        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(os, "pwrite", pwrite_)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("when", ["opening", "writing", "writing on"])
def test_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, code: int) -> None:
    """They are given up for this file, whenever the file system says that it has none."""
    refusing = Refusing(monkeypatch, when, code)
    check([made("large", 9 * MB + 3)], tmp_path)
    assert refusing.refused == 1


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes a part at a time."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[: max(1, len(data) // 2)], offset))
    check([made("large", 5 * MB + 3), made("small", 5000)], tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("size", [100, 9 * MB])
def test_other_errors_are_the_caller_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, code: int) -> None:
    """A full disk is not taken for one without direct writes."""

    def failing(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match=os.strerror(code)):
        write_files([made("file", size)], tmp_path)


STATE = {
    "small": [torch.full((n,), float(n)) for n in range(50)],
    "large": torch.arange(3 * MB // 4, dtype=torch.float32).reshape(3, -1),
    "larger": torch.arange(6 * MB, dtype=torch.int16).view(torch.bfloat16),
    "empty": torch.empty(0),
}


def test_archives_get_their_checksums(tmp_path: Path) -> None:
    """A large one and one among small files, behind each record and in the directory."""
    large, small = TorchImages("large.pt").compose(STATE), TorchImages("small.pt").compose(STATE["small"])
    blocks = [Block.allocate(1, large.size_bytes), Block.allocate(2, 128 + small.size_bytes)]
    sources = [source_of(large, blocks[0]), source_of(small, blocks[1], 128)]
    fill(large, blocks[0])
    fill(small, blocks[1], 128)
    check(sources, tmp_path)
    for name, state in (("large.pt", STATE), ("small.pt", STATE["small"])):
        with zipfile.ZipFile(tmp_path / name) as archive:
            assert archive.testzip() is None
        assert same(torch.load(tmp_path / name, weights_only=True), torch.load(_by_torch(state), weights_only=True))
        content = (tmp_path / name).read_bytes()
        with zipfile.ZipFile(tmp_path / name) as archive:
            for info in archive.infolist():
                behind = info.header_offset + 30 + content[info.header_offset + 26]
                behind += int.from_bytes(content[info.header_offset + 28 : info.header_offset + 30], "little")
                assert content[behind + info.file_size :][:8] == b"PK\x07\x08" + info.CRC.to_bytes(4, "little")


def _by_torch(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_digest_without_writing() -> None:
    """Says what the file would have."""
    source = made("name", 5 * MB + 1)
    entry = digest_source(source)
    assert entry.path == "name"
    assert entry.size_bytes == 5 * MB + 1


class Copying:
    """Content that comes while it is being written, stretch by stretch, each when the writer waits for it."""

    def __init__(self, image: Image, block: Block, *, fail_at: int = ENDLESS) -> None:
        self.whole = Block.allocate(2, image.size_bytes)
        fill(image, self.whole)
        for place, content in (*image.fixed, *image.literals) if image.archives else ():
            block.write(place, content)
        self._image, self._block, self._fail_at = image, block, fail_at
        self._there = 0
        self._lock = threading.Lock()

    def available(self) -> int:
        with self._lock:
            there = self._there
            if there >= self._fail_at:
                raise GivenUpError("no more will come")
            step = 700_001
            for piece in self._image.pieces:
                start, end = max(there, piece.offset), min(there + step, piece.offset + piece.num_bytes)
                if start < end:
                    self._block.write(start, bytes(self.whole.view(start, end - start)))
            if not self._image.pieces:
                length = min(step, self._image.size_bytes - there)
                self._block.write(there, bytes(self.whole.view(there, max(length, 0))))
            self._there = min(there + step, self._image.size_bytes)
            return there


@pytest.mark.parametrize("is_archive", [True, False])
def test_writing_follows_the_copy(tmp_path: Path, is_archive: bool) -> None:
    """The writer begins before anything is there, and never goes beyond what is."""
    image = TorchImages("file").compose(STATE) if is_archive else Image.of_bytes("file", os.urandom(9 * MB + 11))
    block = Block.allocate(1, image.size_bytes)
    copying = Copying(image, block)
    check([source_of(image, block, available=copying.available)], tmp_path)
    if is_archive:
        assert same(torch.load(tmp_path / "file", weights_only=True)["larger"], STATE["larger"])


@pytest.mark.parametrize("fail_at", [0, 5 * MB])
def test_what_is_given_up_ends_the_writing(tmp_path: Path, fail_at: int) -> None:
    """For a large file, for a small one beside it, and for an archive; no thread goes on."""
    before = threading.active_count()
    for image in (TorchImages("file").compose(STATE), Image.of_bytes("file", bytes(9 * MB))):
        block = Block.allocate(1, image.size_bytes)
        copying = Copying(image, block, fail_at=fail_at)
        with pytest.raises(GivenUpError, match="no more"):
            write_files([source_of(image, block, available=copying.available)], tmp_path)
        (tmp_path / "file").unlink()

    def never() -> int:
        raise GivenUpError("no more will come")

    with pytest.raises(GivenUpError):
        write_files([made("whole", 2 * MB), made("small", 10, available=never)], tmp_path)
    assert threading.active_count() == before


def test_pages_are_what_direct_writes_need() -> None:
    """Steps of writing are whole pages."""
    assert file_writer._WRITE_BYTES % PAGE_BYTES == 0
