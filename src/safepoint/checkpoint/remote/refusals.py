"""Distinguishes a store that refuses one object from a store that refuses everything.

Promises: if a store refuses an object of one checkpoint, but serves other objects, the refusal is a fault of this
checkpoint only. Examples are an archived object (Glacier), an object whose encryption key was disabled, and a policy
that denies access to one object. If the refusal counted as an error of the store, one such object would hide all
other checkpoints. If the store serves no object, or does not accept the credentials, the error stays an error of the
store.

Not promised: a person who can create objects may create many that the store refuses. At most 32 other objects are
tried. They are of different checkpoints and kinds, from the oldest and from the newest ones, so the refused objects
have to be both the oldest and the newest ones to count as an error of the store.
"""

import itertools
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

from safepoint.checkpoint.format.manifest import MANIFEST_NAME
from safepoint.errors import ObjectNotFoundError, StorageError, TransientError, UnreadableError
from safepoint.storage.failures import RefusedKeysError
from safepoint.storage.store import Store, StoredObject

ATTEMPT_KEY = ".safepoint/attempt.json"
_MOST_TRIED = 32
_ADVICE = (
    "if it is archived, restore it from the archive; if not, the owner of the bucket has to allow access: check the "
    "policy of the bucket and the key with which the object is encrypted"
)


class Refusals:
    """Finds out, after a refusal, whether the store serves other objects.

    Args:
        store: the store with the checkpoints.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._given: str | None = None

    @contextmanager
    def as_fault(self, key: str, *, deadline_s: float | None = None) -> Generator[None]:
        """For a `with` block that reads the object `key`: turn the refusal of this object into UnreadableError.

        Raises:
            UnreadableError: this object cannot be read, but other objects in the store can be read.
        """
        try:
            yield
        except StorageError as error:
            # A busy server may serve the object later. Access keys that are refused are refused for every object.
            if isinstance(error, TransientError | ObjectNotFoundError | RefusedKeysError):
                raise
            if not self._gives_another(key, deadline_s):
                raise
            raise UnreadableError(
                f"{key} cannot be read, while other objects in {self._store.location} can: {error.message}",
                hint=_ADVICE,
            ) from error

    def _gives_another(self, key: str, deadline_s: float | None) -> bool:
        for other in itertools.islice(self._others(key, deadline_s), _MOST_TRIED):
            try:
                if self._store.read(other, length=1, deadline_s=deadline_s):
                    self._given = other
                    return True
            except TransientError:
                raise
            except StorageError:
                continue
        return False

    def _others(self, key: str, deadline_s: float | None) -> Iterator[str]:
        """Keys of other objects, in the order to try them.

        An object that was served before comes first. After it, manifests and other files of other checkpoints, from
        the newest and from the oldest ones, and files of the same checkpoint take turns. A stranger can choose the
        names of objects, but cannot make them older. An owner who archives objects archives the oldest ones.
        """
        first = [one for one in (self._given, ATTEMPT_KEY) if one not in {None, key}]
        yield from dict.fromkeys(one for one in first if one is not None)
        listed = [item for item in self._store.list(deadline_s=deadline_s) if item.size_bytes]
        listed = sorted((item for item in listed if item.key not in {*first, key}), key=_age)
        own = [item for item in listed if _checkpoint(item.key) == _checkpoint(key)]
        others = [item for item in listed if _checkpoint(item.key) != _checkpoint(key)]
        manifests = [item for item in others if _is_manifest(item.key)]
        files = [item for item in others if not _is_manifest(item.key)]
        turns = [*(_spread(kind) for kind in (manifests[::-1], manifests, files[::-1], files)), _spread(own)]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*turns))
        yield from dict.fromkeys(item.key for item in in_turn if item is not None)


def _age(item: StoredObject) -> tuple[float, str]:
    return item.modified_s, item.key


def _checkpoint(key: str) -> str:
    return key.partition("/")[0]


def _is_manifest(key: str) -> bool:
    return key.endswith(f"/{MANIFEST_NAME}")


def _spread(items: Iterable[StoredObject]) -> list[StoredObject]:
    """The first object of each checkpoint, followed by the other objects."""
    first: dict[str, StoredObject] = {}
    rest: list[StoredObject] = []
    for item in items:
        if first.setdefault(_checkpoint(item.key), item) is not item:
            rest.append(item)
    return [*first.values(), *rest]
