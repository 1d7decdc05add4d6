"""Protected files: what is read is what was written, or nothing is read."""

import io
import random
from pathlib import Path

import pytest

from safepoint.errors import ImageError, StorageError
from safepoint.transparent.protection.files import (
    CHUNK_BYTES,
    TAG_BYTES,
    FileProtection,
    ProtectedFile,
    ProtectedWriter,
    content_bytes,
)
from safepoint.transparent.protection.keys import ImageKey, ImageProtection, own_key, own_key_path, read_key

_SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)
_KEY = ImageKey(bytes(range(32)))


def protection(is_encrypted: bool, path: str = "part-0/core-1.img", key: ImageKey = _KEY) -> FileProtection:
    return ImageProtection(salt=b"s" * 32, is_encrypted=is_encrypted, key=key).of_file(path)


def write(path: Path, data: bytes, given: FileProtection | None, *, piece: int = 10_000) -> bytes:
    target = io.BytesIO()
    writer = ProtectedWriter(target, given)
    for begin in range(0, len(data), piece):
        writer.write(data[begin : begin + piece])
    digest = writer.end()
    assert digest.size_bytes == len(target.getvalue())
    path.write_bytes(target.getvalue())
    return target.getvalue()


@pytest.mark.parametrize("size_bytes", _SIZES)
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_file_comes_back(tmp_path: Path, size_bytes: int, *, is_encrypted: bool) -> None:
    """As a whole, and any range of it; an authenticated file begins with its bytes, an encrypted one hides them."""
    data = random.Random(size_bytes).randbytes(size_bytes)
    given = protection(is_encrypted)
    stored = write(tmp_path / "file", data, given)
    assert stored.startswith(data) == (not is_encrypted or not data)
    assert content_bytes(len(stored)) == size_bytes
    with ProtectedFile(tmp_path / "file", given) as file:
        assert file.size_bytes == size_bytes
        assert bytes(memoryview(file.content())) == data
        for begin in {0, size_bytes // 2, max(0, size_bytes - 1)}:
            for end in {begin, size_bytes, (begin + size_bytes) // 2}:
                assert file.read(begin, end - begin) == data[begin:end]
        with pytest.raises(ImageError, match="ends too early"):
            file.read(0, size_bytes + 1)


def test_sizes_that_no_file_has() -> None:
    """The size of the content follows from that of the file; half a tag or an empty last chunk is refused."""
    for size_bytes in _SIZES:
        num_chunks = max(1, -(-size_bytes // CHUNK_BYTES))
        assert content_bytes(size_bytes + num_chunks * TAG_BYTES) == size_bytes
    for stored in (0, TAG_BYTES - 1, CHUNK_BYTES + TAG_BYTES + 1, CHUNK_BYTES + 2 * TAG_BYTES):
        assert content_bytes(stored) == -1


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_each_change_is_found(tmp_path: Path, *, is_encrypted: bool) -> None:
    """A changed byte or tag, exchanged chunks, a file that is cut off or has more: nothing of it is returned."""
    given = protection(is_encrypted)
    stored = write(tmp_path / "file", random.Random(1).randbytes(2 * CHUNK_BYTES + 100), given)
    tags = 2 * CHUNK_BYTES + 100
    changes = {
        "byte": stored[:5] + bytes([stored[5] ^ 1]) + stored[6:],
        "tag": stored[:-1] + bytes([stored[-1] ^ 1]),
        "exchanged": stored[CHUNK_BYTES : 2 * CHUNK_BYTES] + stored[:CHUNK_BYTES] + stored[2 * CHUNK_BYTES :],
        "exchanged with tags": stored[CHUNK_BYTES : 2 * CHUNK_BYTES]
        + stored[:CHUNK_BYTES]
        + stored[2 * CHUNK_BYTES : tags]
        + stored[tags + TAG_BYTES : tags + 2 * TAG_BYTES]
        + stored[tags : tags + TAG_BYTES]
        + stored[tags + 2 * TAG_BYTES :],
        "cut off at a chunk": stored[: 2 * CHUNK_BYTES] + stored[tags : tags + 2 * TAG_BYTES],
        "cut off": stored[:-20],
        "more": stored + bytes(10),
    }
    for name, data in changes.items():
        (tmp_path / "file").write_bytes(data)
        for read in (read_content, read_ranges):
            with pytest.raises(ImageError):
                read(tmp_path / "file", given, name)


def read_content(path: Path, given: FileProtection, what: str) -> None:
    with ProtectedFile(path, given) as file:
        file.content()
    pytest.fail(what)


def read_ranges(path: Path, given: FileProtection, what: str) -> None:
    with ProtectedFile(path, given) as file:
        for begin in range(0, file.size_bytes, 50_000):
            file.read(begin, min(50_000, file.size_bytes - begin))
    pytest.fail(what)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_key_is_of_one_file_of_one_image(tmp_path: Path, *, is_encrypted: bool) -> None:
    """So that a file of another image, or another file of the same one, does not take its place."""
    write(tmp_path / "file", b"memory", protection(is_encrypted))
    others = [
        protection(is_encrypted, "part-0/core-2.img"),
        protection(is_encrypted, key=ImageKey(b"k" * 32)),
        ImageProtection(salt=b"t" * 32, is_encrypted=is_encrypted, key=_KEY).of_file("part-0/core-1.img"),
    ]
    for other in others:
        with (
            pytest.raises(ImageError, match="does not have the image's key"),
            ProtectedFile(tmp_path / "file", other) as file,
        ):
            file.read(0, 6)
    assert protection(False).key != protection(True).key


def test_without_its_key(tmp_path: Path) -> None:
    """An authenticated file can be read, and nothing says that it is authentic; an encrypted one cannot be read."""
    write(tmp_path / "file", b"memory", protection(False))
    with ProtectedFile(tmp_path / "file", FileProtection(is_encrypted=False, key=None)) as file:
        assert file.read(0, 6) == b"memory"
    with pytest.raises(ImageError, match="encrypted"):
        ProtectedFile(tmp_path / "file", FileProtection(is_encrypted=True, key=None))
    with pytest.raises(ValueError, match="without a key"):
        ProtectedWriter(io.BytesIO(), FileProtection(is_encrypted=False, key=None))


def test_without_a_protection(tmp_path: Path) -> None:
    assert write(tmp_path / "file", b"memory", None) == b"memory"
    with ProtectedFile(tmp_path / "file", None) as file:
        assert file.read(2, 4) == b"mory"


def test_derived_keys_stay_the_same() -> None:
    """Images of today are read by later releases. The values are those of HKDF-SHA256 of RFC 5869."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    def derived(salt: bytes | None, purpose: str) -> bytes:
        info = f"process image v1 {purpose}".encode()
        return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(_KEY.secret)

    assert protection(True).key == derived(b"s" * 32, "encrypted file part-0/core-1.img")
    assert protection(False).key == derived(b"s" * 32, "authenticated file part-0/core-1.img")
    assert bytes.fromhex(_KEY.id) == derived(None, "id")[:8]


def test_keys_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This user's own key is made once. A key in a file has 32 bytes, and no other user can read it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert not own_key_path().exists()
    key = own_key()
    assert own_key() == key
    assert read_key(own_key_path()) == key
    assert own_key_path().stat().st_mode & 0o777 == 0o600
    assert key.secret.hex() not in repr(key)
    path = tmp_path / "key"
    with pytest.raises(StorageError, match="No such file") as raised:
        read_key(path)
    assert "urandom" in (raised.value.hint or "")
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(StorageError, match="is not a key"):
        read_key(path)
    path.write_bytes(bytes(32))
    path.chmod(0o644)
    with pytest.raises(StorageError, match="other users can read it"):
        read_key(path)
