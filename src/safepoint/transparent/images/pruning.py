"""Deletes the images that no policy keeps, and that no kept image needs.

These images are always kept: the newest image, the newest valid image, images that a process reads, damaged images,
and the images that any of these needs. If the manifest of an image cannot be read, for example because a newer
release has written it, the image may need any older image. So all older images are kept too.

These rules apply separately to the images of the location's key, and to the images without protection. So another
person who puts images with higher numbers here cannot cause the deletion of an image of the key. Images that state
another key are always kept: without that key, it is not known who has made them.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from safepoint.checkpoint.local.retention import Candidate, Policy, select_superseded
from safepoint.errors import ImageError, SafepointError
from safepoint.foundation import clock
from safepoint.transparent.images.location import ImageLocation
from safepoint.transparent.images.manifest import ImageManifest
from safepoint.transparent.images.materialise import verify
from safepoint.transparent.images.names import image_name, number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What `prune` has done.

    Args:
        deleted: the images that are gone, newest first.
        needed: the images that no policy keeps, and that a kept image needs or may need.
        unreadable: the images whose manifests cannot be read, newest first: they may need any older image.
        of_other_keys: the images that state another key than the key of the location, newest first.
        failed: the images that could not be deleted, each with the reason.
    """

    deleted: tuple[ImageManifest, ...] = ()
    needed: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    of_other_keys: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()


def prune(location: ImageLocation, policies: Sequence[Policy], *, is_dry_run: bool = False) -> Pruned:
    """Delete images, newest first, so that an image never lacks an image that it needs.

    Args:
        location: where the images are.
        policies: which images to keep; the number of an image replaces a checkpoint's step.
        is_dry_run: only find out what would be deleted.

    Raises:
        ConflictError: another process writes an image here.
        StorageError: the location cannot be used.
    """
    if is_dry_run:
        return _plan(location, policies)
    deleted: list[ImageManifest] = []
    failed: list[tuple[str, str]] = []
    with location.locked():
        plan = _plan(location, policies)
        for one in plan.deleted:
            try:
                location.delete(one.name)
            except (OSError, SafepointError) as error:
                reason = error.message if isinstance(error, SafepointError) else error.strerror
                failed.append((one.name, reason or str(error)))
                break  # this image may need the older images
            deleted.append(one)
    return replace(plan, deleted=tuple(deleted), failed=tuple(failed))


def _plan(location: ImageLocation, policies: Sequence[Policy]) -> Pruned:
    """What would be deleted, and what is kept only because other images need it."""
    manifests: dict[str, ImageManifest] = {}
    unreadable: list[str] = []
    for name in location.names():
        try:
            manifests[name] = location.read(name)
        except ImageError:
            unreadable.append(name)
    known_keys = {"", "" if location.key is None else location.key.id}
    known = {name: one for name, one in manifests.items() if _key_of(one) in known_keys}
    candidates = [
        Candidate(
            step=manifest.number,
            run_id=_key_of(manifest),
            created_s=clock.parse_utc_or_inf(manifest.created),
            is_valid=not location.faults(manifest),
            is_in_use=location.is_in_use(name),
        )
        for name, manifest in known.items()
    ]

    def is_good(number: int) -> bool:
        with contextlib.suppress(ImageError):
            verify(location, image_name(number), deep=False)
            return True
        return False

    superseded = select_superseded(candidates, policies, now_s=clock.wall_s(), is_good=is_good)
    chosen = {image_name(number) for number in superseded}
    needed = {source.name for name in manifests.keys() - chosen for source in manifests[name].sources}
    newest_unreadable = max((number_of(name) or 0 for name in unreadable), default=0)
    needed |= {name for name in chosen if (number_of(name) or 0) < newest_unreadable}
    return Pruned(
        deleted=tuple(manifest for name, manifest in manifests.items() if name in chosen - needed),
        needed=tuple(name for name in manifests if name in chosen & needed),
        unreadable=tuple(unreadable),
        of_other_keys=tuple(name for name in manifests if name not in known),
    )


def _key_of(manifest: ImageManifest) -> str:
    return "" if manifest.protection is None else manifest.protection.key_id
