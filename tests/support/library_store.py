"""obstore's bucket on a server of S3: there are no servers of Google Cloud Storage and Azure here."""

from datetime import timedelta
from typing import Any

import pytest
from obstore.store import S3Store

from safepoint.storage.library import library_bucket
from safepoint.storage.library.key_files import KeyFiles
from safepoint.storage.library.library_bucket import LibraryBucket
from safepoint.storage.location import Location
from safepoint.storage.object_store import ObjectStore
from safepoint.storage.options import StorageOptions
from tests.support.s3_server import S3Server


def library_store(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch, *, endpoint: str | None = None
) -> ObjectStore:
    """A store whose requests go through obstore, as those to Google and Azure do; until the test ends."""

    def make_client(
        location: Location, _: StorageOptions, timeout_s: float, keys: KeyFiles, *, is_repeating: bool = False
    ) -> Any:
        return S3Store(
            location.bucket,
            endpoint=endpoint or server.endpoint,
            access_key_id=server.keys[0],
            secret_access_key=server.keys[1],
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timedelta(seconds=timeout_s)},
            retry_config={"max_retries": 10 if is_repeating else 0, "retry_timeout": timedelta(seconds=120)},
        )

    monkeypatch.setattr(library_bucket, "make_client", make_client)
    store = ObjectStore(server.location(prefix), StorageOptions.from_environment(server.variables))
    store._requests = LibraryBucket(store.location, store._options)
    return store
