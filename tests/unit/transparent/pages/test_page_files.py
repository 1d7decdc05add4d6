"""Page files: every stream of pages comes back as it was, and nothing else is ever restored."""

import io
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.checkpoint.format.digest import digest_file
from safepoint.errors import ImageError, MissingExtraError
from safepoint.transparent.pages import reader
from safepoint.transparent.pages.layout import MOST_PAGES, PAGE_BYTES, REGION_PAGES, TableHeader
from safepoint.transparent.pages.older import OlderPages
from safepoint.transparent.pages.reader import check_pages, restore_pages
from safepoint.transparent.pages.regions import RegionFile, compress, decompress
from safepoint.transparent.pages.table import PageFileId, PageTable
from safepoint.transparent.pages.writer import WrittenPages, regions_name, table_name, write_pages

_SEED = 0x1234_5678_9ABC_DEF0


def num_stored_of(tables: Mapping[PageFileId, PageTable]) -> dict[PageFileId, int]:
    """The stored pages of each page file, as `PageTable.check_runs` needs them."""
    return {key: table.header.num_stored for key, table in tables.items()}


class Chain:
    """Images with one page file each; every image may refer to pages of those before it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.streams: list[bytes] = []
        self.written: list[WrittenPages] = []

    def folder(self, image: int) -> Path:
        return self.root / f"image-{image}"

    def add(self, stream: bytes, *, most_listed: int = 1 << 20) -> WrittenPages:
        folder = self.folder(len(self.streams))
        folder.mkdir()
        older = OlderPages({(0, 1): self.table(-1)}, most_listed=most_listed) if self.streams else None
        written = write_pages(io.BytesIO(stream), folder, part=0, file=1, seed=_SEED, older=older)
        self.streams.append(stream)
        self.written.append(written)
        return written

    def table(self, image: int) -> PageTable:
        return PageTable.open(self.folder(image % len(self.streams)) / table_name(1))

    def tables(self, image: int) -> dict[PageFileId, PageTable]:
        """The tables that an image may refer to: its own, then those before it, newest first."""
        return {PageFileId(1 + distance, 0, 1): self.table(image - distance) for distance in range(image + 1)}

    def restore(self, image: int) -> bytes:
        tables = self.tables(image)
        table = tables[PageFileId(1, 0, 1)]
        table.check_runs(num_stored_of(tables))
        return restored(
            table,
            {key: self.folder(image + 1 - key.image) / regions_name(1) for key in tables},
            tables,
            self.root / "restored",
        )


def restored(
    table: PageTable, paths: Mapping[PageFileId, Path], tables: Mapping[PageFileId, PageTable], target: Path
) -> bytes:
    opened: dict[PageFileId, RegionFile] = {}
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        for key, path in paths.items():
            opened[key] = RegionFile(path, tables[key])
        check_pages(table, opened)
        restore_pages(table, opened, descriptor)
        alone = target.read_bytes()
        os.ftruncate(descriptor, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader, "_LEAST_PAGES", 16)
            patch.setattr(reader, "_NUM_TOGETHER", 1)
            restore_pages(table, opened, descriptor)
        assert target.read_bytes() == alone
        return alone
    finally:
        os.close(descriptor)
        for one in opened.values():
            one.close()


def page(kind: str, number: int) -> bytes:
    """A page: zero, compressible or random, the same for the same number; or zero but for its last byte."""
    if kind == "zero":
        return bytes(PAGE_BYTES)
    if kind == "last":
        return bytes(PAGE_BYTES - 1) + bytes([1 + number % 255])
    generator = np.random.default_rng(number)
    if kind == "random":
        return generator.bytes(PAGE_BYTES)
    return bytes(generator.integers(0, 3, PAGE_BYTES, np.uint8))


_PAGES = st.lists(
    st.tuples(st.sampled_from(["zero", "last", "compressible", "random"]), st.integers(0, 6), st.integers(1, 90)),
    max_size=8,
).map(lambda runs: b"".join(page(kind, number) * length for kind, number, length in runs))


@settings(max_examples=40, deadline=None)
@given(st.lists(_PAGES, min_size=1, max_size=4))
def test_every_chain_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, streams: list[bytes]) -> None:
    """Streams of any pages, in chains of up to four; each page is counted once."""
    chain = Chain(tmp_path_factory.mktemp("chain"))
    for stream in streams:
        written = chain.add(stream)
        assert written.num_zero + written.num_equal + written.num_stored == written.num_pages
    for image, stream in enumerate(streams):
        assert chain.restore(image) == stream
        found = chain.table(image).check_runs(num_stored_of(chain.tables(image)))
        assert found == (
            chain.written[image].num_zero,
            chain.written[image].num_stored,
            chain.written[image].num_equal,
        )
    shutil.rmtree(chain.root)


def test_zero_pages_take_no_bytes(tmp_path: Path) -> None:
    """Also when they are restored: they become a hole."""
    chain = Chain(tmp_path)
    written = chain.add(bytes(1000 * PAGE_BYTES))
    assert (written.num_zero, written.num_stored, written.regions.size_bytes) == (1000, 0, 16)
    assert chain.restore(0) == chain.streams[0]
    assert (tmp_path / "restored").stat().st_blocks == 0


def test_random_pages_are_stored_raw_and_others_compressed(tmp_path: Path) -> None:
    """LZ4 must never make a file larger than the pages are."""
    chain = Chain(tmp_path)
    raw = b"".join(page("random", number) for number in range(200))
    assert chain.add(raw).regions.size_bytes == 16 + len(raw)
    text = b"".join(page("compressible", 1000 + number) for number in range(200))
    assert chain.add(text).regions.size_bytes < 0.6 * len(text)


@pytest.mark.parametrize("most_listed", [1 << 20, 300])
def test_pages_that_moved_are_found(tmp_path: Path, most_listed: int) -> None:
    """The CUDA driver puts its copy of a GPU's memory at other addresses each time: in another order, in blocks.

    Also when the table for looking up holds only a tenth of the pages.
    """
    chain = Chain(tmp_path)
    blocks = [b"".join(page("random", 1000 * block + number) for number in range(300)) for block in range(10)]
    chain.add(b"".join(blocks))
    order = [3, 1, 9, 0, 2, 8, 7, 4, 6, 5]
    new = [page("random", 100_000 + number) for number in range(20)]
    moved = b"".join(blocks[number] + b"".join(new[2 * place : 2 * place + 2]) for place, number in enumerate(order))
    written = chain.add(moved, most_listed=most_listed)
    assert written.num_stored == 20
    assert chain.restore(1) == moved


def test_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    """They are computed while the files are written, and go into the manifest."""
    chain = Chain(tmp_path)
    written = chain.add(b"".join(page("random", number) for number in range(100)))
    assert digest_file(chain.folder(0) / table_name(1)) == written.table
    assert digest_file(chain.folder(0) / regions_name(1)) == written.regions
    assert sorted(os.listdir(chain.folder(0))) == [regions_name(1), table_name(1)]
    assert {path.stat().st_mode & 0o777 for path in chain.folder(0).iterdir()} == {0o600}


def test_a_stream_that_ends_in_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="whole page"):
        write_pages(io.BytesIO(bytes(PAGE_BYTES + 1)), tmp_path, part=0, file=1, seed=_SEED)


class _Dripping(io.RawIOBase):
    """A stream that returns few bytes at a time, as a pipe does."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), len(self._data), 777)
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def test_a_stream_may_drip(tmp_path: Path) -> None:
    data = page("random", 1) * 3 + page("zero", 0)
    written = write_pages(_Dripping(data), tmp_path, part=0, file=1, seed=_SEED)
    assert (written.num_pages, written.num_stored) == (4, 3)


def test_without_the_extra_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="safepoint\\[transparent\\]"):
        write_pages(io.BytesIO(), tmp_path, part=0, file=1, seed=_SEED)
    assert os.listdir(tmp_path) == []


# ---- hostile files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Three images whose last one has zero, raw, compressed and equal pages, the latter in both older images."""
    made = Chain(tmp_path_factory.mktemp("chain"))
    random_pages = [page("random", number) for number in range(150)]
    text = [page("compressible", 500 + number) for number in range(150)]
    made.add(b"".join([*random_pages[:70], bytes(10 * PAGE_BYTES), *text[:70]]))
    made.add(b"".join([*random_pages[:100], *text[:60], bytes(7 * PAGE_BYTES)]))
    made.add(b"".join([*text[40:110], *random_pages[60:140], bytes(9 * PAGE_BYTES), *text[:20]]))
    assert made.written[2].num_stored
    assert made.written[2].num_equal
    assert {run["image"] for run in made.table(2).runs} == {0, 1, 2, 3}
    return made


def test_mutations_are_refused_or_restored_equal(chain: Chain) -> None:
    """500 changes of any file of a chain: a wrong page is never restored, and no other error is raised."""
    seed = 2121
    chance = random.Random(seed)
    num_refused = 0
    for turn in range(500):
        path = chain.folder(chance.randrange(3)) / chance.choice([table_name(1), regions_name(1)])
        whole = path.read_bytes()
        path.write_bytes(_mutated(whole, chance))
        try:
            assert chain.restore(2) == chain.streams[2], f"seed {seed}, turn {turn}"
        except ImageError:
            num_refused += 1
        finally:
            path.write_bytes(whole)
    assert num_refused > 400
    assert chain.restore(2) == chain.streams[2]


def _mutated(whole: bytes, chance: random.Random) -> bytes:
    data = bytearray(whole)
    kind = chance.randrange(4)
    if kind == 0:
        del data[chance.randrange(len(data)) :]
    elif kind == 1:
        data += chance.randbytes(chance.randint(1, 100))
    elif kind == 2:  # a header is small, and each of its numbers matters
        data[chance.randrange(min(80, len(data)))] ^= 1 << chance.randrange(8)
    else:
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def _forged(chain: Chain, tmp_path: Path, runs: Sequence[tuple[int, int, int, int, int]], **header: int) -> PageTable:
    """A table with a right digest and other runs than the writer writes."""
    import xxhash

    whole = (chain.folder(2) / table_name(1)).read_bytes()
    old = TableHeader.from_bytes(whole, "x")
    packed = b"".join(
        value.to_bytes(size, "little") for run in runs for value, size in zip(run, (4, 4, 4, 4, 8), strict=True)
    )
    begin = TableHeader.SIZE_BYTES + old.num_runs * 24
    new = replace(old, num_runs=len(runs), **header)
    body = new.to_bytes() + packed + whole[begin:-16]
    path = tmp_path / table_name(1)
    path.write_bytes(body + xxhash.xxh3_128_digest(body))
    return PageTable.open(path)


@pytest.mark.parametrize(
    "run",
    [
        (179, 1, 0, 1, 1 << 40),
        (179, 1, 0, 1, (1 << 64) - 1),
        (179, 1, 0, 1, 70),
        (179, 1, 0, 2, 0),
        (179, 1, 1, 1, 0),
        (179, 4, 0, 1, 0),
        (179, (1 << 32) - 1, 0, 1, 0),
        (179, 0, 0, 0, 1),
        (179, 0, 0, 1, 0),
        ((1 << 32) - 1, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
        (178, 0, 0, 0, 0),
    ],
)
def test_a_run_that_leads_elsewhere_is_refused(
    chain: Chain, tmp_path: Path, run: tuple[int, int, int, int, int]
) -> None:
    """The digests of a hostile table are right; the places that it names are not."""
    table = _forged(chain, tmp_path, [run])
    assert table.header.num_pages == 179
    with pytest.raises(ImageError):
        table.check_runs(num_stored_of(chain.tables(2)))


def test_wrong_pages_with_right_digests_are_refused(chain: Chain, tmp_path: Path) -> None:
    """A table that exchanges pages passes all checks but the last: the digest of the stream."""
    table = _forged(chain, tmp_path, [(179, 0, 0, 0, 0)])
    table.check_runs({})
    with pytest.raises(ImageError, match="differ from the pages that were stored"):
        restored(table, {}, {}, tmp_path / "out")


@pytest.mark.parametrize("number", [0, MOST_PAGES + 1, 1 << 60])
def test_a_table_states_its_own_size(chain: Chain, tmp_path: Path, number: int) -> None:
    """Numbers of pages that the file has no room for are refused before anything of this size is allocated."""
    with pytest.raises(ImageError):
        _forged(chain, tmp_path, [(179, 0, 0, 0, 0)], num_pages=number)


def test_a_region_must_decompress_to_its_pages() -> None:
    packed = bytes(compress(memoryview(bytes(REGION_PAGES * PAGE_BYTES))))
    for size in (PAGE_BYTES, 2 * REGION_PAGES * PAGE_BYTES):
        with pytest.raises(ImageError):
            decompress(packed, size)


def test_links_are_not_followed(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / table_name(1)).symlink_to(chain.folder(2) / table_name(1))
    with pytest.raises(OSError, match=r"link|symbolic"):
        PageTable.open(tmp_path / table_name(1))
