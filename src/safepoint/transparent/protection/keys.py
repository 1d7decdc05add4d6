"""The keys of images: a user's own key, and keys in files that commands name.

One key is enough for any number of images. Each image has random salt. From the key and the salt, the keys of the
image are derived (HKDF with SHA-256): one for its manifest, and one for each of its files. So no two files ever share
a key.
"""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from safepoint.errors import ImageError
from safepoint.foundation.configuration import user_file
from safepoint.foundation.files import make_private_folder
from safepoint.foundation.shared_folders.secret_keys import load_key, load_or_make_key
from safepoint.transparent.protection.files import FileProtection

SALT_BYTES = 32
KEY_NAME = "images.key"
KEY_VARIABLE = "SAFEPOINT_IMAGES_KEY"
_WHAT = "key of process images"


@dataclass(frozen=True, slots=True)
class ImageKey:
    """A key with which images are protected.

    Args:
        secret: 32 random bytes.
    """

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """16 hex digits that name the key, and do not reveal it."""
        return _derived(self.secret, b"", "id")[:8].hex()


def read_key(path: Path) -> ImageKey:
    """The key in a file that a person has named.

    Raises:
        StorageError: the file cannot be read, does not have exactly 32 bytes, or other users can read it.
    """
    hint = f"make a key with: (umask 077; head -c 32 /dev/urandom > {path})"
    return ImageKey(load_key(path, what=_WHAT, hint=hint))


def own_key_path() -> Path:
    """Where this user's own key is.

    The variable SAFEPOINT_IMAGES_KEY can name its file, as in the pods of a job. Otherwise, the file is beside the
    user's settings.
    """
    named = os.environ.get(KEY_VARIABLE)
    return Path(named) if named else user_file().with_name(KEY_NAME)


def own_key() -> ImageKey:
    """This user's own key; a new one if there is none.

    Raises:
        StorageError: the key cannot be made or read, or other users can read it.
    """
    path = own_key_path()
    make_private_folder(path.parent)
    hint = "name another key with --key; images that were made with this key then need --trust"
    return ImageKey(load_or_make_key(path, what=_WHAT, hint=hint))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProtection:
    """How one image is protected.

    Args:
        salt: random bytes of this image.
        is_encrypted: whether its files are encrypted; otherwise they are only authenticated.
        key: its key. None if it is not known; then the image must not be encrypted, and nothing is authenticated.
    """

    salt: bytes
    is_encrypted: bool
    key: ImageKey | None

    @classmethod
    def new(cls, key: ImageKey, *, is_encrypted: bool) -> "ImageProtection":
        """The protection of a new image."""
        return cls(salt=secrets.token_bytes(SALT_BYTES), is_encrypted=is_encrypted, key=key)

    def of_file(self, path: str) -> FileProtection:
        """The protection of the file at `path` within the image."""
        purpose = "encrypted" if self.is_encrypted else "authenticated"
        key = None if self.key is None else _derived(self.key.secret, self.salt, f"{purpose} file {path}")
        return FileProtection(is_encrypted=self.is_encrypted, key=key)

    def mac(self, manifest: bytes) -> str:
        """The code that authenticates a manifest, 64 hex digits.

        Raises:
            ImageError: the key is not known.
        """
        if self.key is None:
            raise ImageError("the key of the image is not known", hint="name it with --key")
        return hmac.digest(_derived(self.key.secret, self.salt, "manifest"), manifest, "sha256").hex()


def _derived(secret: bytes, salt: bytes, purpose: str) -> bytes:
    """HKDF (RFC 5869) with SHA-256, for 32 bytes."""
    extracted = hmac.digest(salt or bytes(hashlib.sha256().digest_size), secret, "sha256")
    return hmac.digest(extracted, f"process image v1 {purpose}\x01".encode(), "sha256")
