"""Locations as people write them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.storage.location import Location, Scheme, parse_location, resolve_claim
from safepoint.storage.opening import open_store

_BUCKET = st.text("abcxyz09-_.", min_size=1, max_size=8).map(lambda word: f"b{word}")
_WORD = st.text("abcxyz09-_. äß", min_size=1, max_size=8).filter(lambda word: word.strip(". ") == word)


@pytest.mark.parametrize(
    ("text", "scheme", "bucket", "path"),
    [
        ("out", Scheme.FILE, "", "out"),
        ("/a//b/", Scheme.FILE, "", "/a/b"),
        ("/", Scheme.FILE, "", "/"),
        ("file:///a/b", Scheme.FILE, "", "/a/b"),
        ("FILE:///a", Scheme.FILE, "", "/a"),
        ("s3://bucket", Scheme.S3, "bucket", ""),
        ("S3://bucket//a///b/", Scheme.S3, "bucket", "a/b"),
        ("gs://bucket/a b", Scheme.GS, "bucket", "a b"),
        ("az://container/x", Scheme.AZ, "container", "x"),
        ("pvc://claim/runs/1", Scheme.PVC, "claim", "runs/1"),
    ],
)
def test_what_is_meant(text: str, scheme: Scheme, bucket: str, path: str) -> None:
    """Case of the scheme, duplicate slashes and a last slash do not matter."""
    assert parse_location(text) == Location(scheme=scheme, bucket=bucket, path=path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "ftp://host/x", "s3://", "s3:///x", "pvc:///x", "s3://..", "s3://b/../c", "gs://b/./c"),
        *("file://relative", "s3:/bucket", "S3:bucket", "a\nb", "s3://b/\x1b[2J", "https://bucket.s3.example.com"),
    ],
)
def test_what_cannot_be_meant_names_the_value_and_the_forms(text: str) -> None:
    """A person sees what was read, and what could be written instead."""
    with pytest.raises(ValueError, match="the location") as error:
        parse_location(text)
    assert repr(text) in str(error.value)


@given(st.sampled_from(["s3", "gs", "az", "pvc"]), _BUCKET, st.lists(_WORD, max_size=3))
def test_text_and_location_are_one(scheme: str, bucket: str, parts: list[str]) -> None:
    """Written and read again, it is the same place."""
    location = Location(scheme=Scheme(scheme), bucket=bucket, path="/".join(parts))
    assert parse_location(str(location)) == location
    child = location.child("checkpoint-20")
    assert str(child).endswith("/checkpoint-20")
    assert parse_location(str(child)) == child


def test_a_claim_is_a_folder_in_its_pod_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the error says what is mounted, or that this is no pod."""
    location = parse_location("pvc://models/run")
    assert resolve_claim(location, "data=/data,models=/mnt/models").folder == Path("/mnt/models/run")
    with pytest.raises(ValueError, match="mounts data"):
        resolve_claim(location, "data=/data")
    monkeypatch.delenv("SAFEPOINT_PVC_MOUNTS", raising=False)
    with pytest.raises(ValueError, match="not a pod"):
        resolve_claim(location)
    with pytest.raises(ValueError, match="not a folder"):
        _ = location.folder


def test_a_claim_is_opened_with_the_variables_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may have other claims than this process."""
    monkeypatch.setenv("SAFEPOINT_PVC_MOUNTS", "models=/own")
    location = parse_location("pvc://models/run")
    assert open_store(location).location.folder == Path("/own/run")
    assert open_store(location, environ={"SAFEPOINT_PVC_MOUNTS": "models=/jobs"}).location.folder == Path("/jobs/run")
    with pytest.raises(ValueError, match="not a pod"):
        open_store(location, environ={})


def test_names_of_buckets() -> None:
    """The message states exactly which names are valid."""
    for scheme, what in (("s3", "bucket"), ("gs", "bucket"), ("az", "container"), ("pvc", "claim")):
        assert parse_location(f"{scheme}://{'a' * 254}/run").bucket == "a" * 254
        for bucket in ("a" * 255, "$" + "a" * 254, "$other", "-a", "_a"):
            with pytest.raises(ValueError, match=f"a {what} name begins with a letter or a digit") as caught:
                parse_location(f"{scheme}://{bucket}/run")
            assert ("; or it is $blobchangefeed, $logs, $root, $web" in str(caught.value)) is (scheme == "az")
        if scheme == "az":
            assert parse_location("az://$web/run").bucket == "$web"
        else:
            with pytest.raises(ValueError, match="begins with a letter or a digit"):
                parse_location(f"{scheme}://$web/run")


@pytest.mark.parametrize(
    ("text", "parent", "name"),
    [
        ("out/checkpoint-20", "out", "checkpoint-20"),
        ("checkpoint-20", ".", "checkpoint-20"),
        ("/checkpoint-20", "/", "checkpoint-20"),
        ("s3://bucket/run/final", "s3://bucket/run", "final"),
        ("s3://bucket/final", "s3://bucket", "final"),
        ("s3://bucket", "s3://bucket", ""),
    ],
)
def test_parent_and_name_split_the_path(text: str, parent: str, name: str) -> None:
    """A folder always has a parent that can be listed; a bucket has none but itself."""
    location = parse_location(text)
    assert (str(location.parent), location.name) == (parent, name)


def test_only_folders_are_resolved(tmp_path: Path) -> None:
    """A claim is looked up only where the location names one, and only folders depend on the current folder."""
    bucket, claim = parse_location("s3://bucket/run"), parse_location("pvc://models/run")
    assert (resolve_claim(bucket), bucket.resolved("/data"), claim.resolved("/data")) == (bucket, bucket, claim)
    assert (claim.claim, bucket.claim, bucket.is_folder, bucket.is_remote) == ("models", None, False, True)
    assert parse_location("out").resolved(str(tmp_path)) == Location.of_folder(tmp_path.resolve() / "out")
