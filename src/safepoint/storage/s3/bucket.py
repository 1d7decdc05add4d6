"""A bucket of S3 or a compatible server: small objects in one request, large objects in parts; see `Bucket`."""

import base64
import http.client
import itertools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from safepoint.errors import AccessDeniedError, ConditionError, ObjectNotFoundError, StorageError, TransientError
from safepoint.foundation import clock
from safepoint.storage.s3.answers import identifier, other_answer, present, refusing_other_answers, size_of, time_of
from safepoint.storage.s3.exchange import Request, received, refuse_failure
from safepoint.storage.s3.file_parts import md5_of
from safepoint.storage.s3.multipart import upload_in_parts
from safepoint.storage.s3.requests import S3Requests, UploadId
from safepoint.storage.store import WHOLE_BYTES, Condition, Content, OpenFile, Progress, StoredObject, too_long

_WHY_BYTES = 64 << 10
_NUM_LISTINGS = 8
_MOST_KEYS = 10_000
_log = logging.getLogger("safepoint")


class S3Bucket(S3Requests):
    """A bucket of S3 or of a compatible server. It needs no other package than Safepoint."""

    def head(self, key: str, *, deadline_s: float | None) -> StoredObject:
        """See `Bucket`."""
        try:
            return self._head(key, deadline_s)
        except (ObjectNotFoundError, ConditionError, TransientError):
            raise
        except StorageError:
            # An answer to HEAD has no body, so it does not contain the reason of the failure. The answer to GET
            # contains the reason. If the reason is an expired key, new keys are fetched, and `_head` succeeds.
            self._ask_why(key, deadline_s)
            return self._head(key, deadline_s)

    def _head(self, key: str, deadline_s: float | None) -> StoredObject:
        headers = self._call(Request(method="HEAD", key=key, query={}), deadline_s).headers
        with refusing_other_answers(self._what("HEAD", key)):
            return StoredObject(
                key=key,
                size_bytes=size_of(headers["Content-Length"]),
                version=present(identifier(headers["ETag"])),
                modified_s=time_of(headers["Last-Modified"]),
            )

    def _ask_why(self, key: str, deadline_s: float | None) -> None:
        what = self._what("GET", key)

        def receive(response: http.client.HTTPResponse) -> None:
            if response.status != 416:  # 416: an empty object has no first byte
                refuse_failure(response, what)
            received(response, _WHY_BYTES)

        request = Request(method="GET", key=key, query={}, headers={"range": "bytes=0-0"})
        self._exchange(lambda: request, what, receive, deadline_s)

    def get_rest(self, key: str, *, start: int, most_bytes: int, deadline_s: float | None) -> bytearray:
        """See `Bucket`. The time limit suffices for `WHOLE_BYTES`, so call this for small objects only."""
        what = self._what("GET", key)

        def receive(response: http.client.HTTPResponse) -> bytearray:
            refuse_failure(response, what)
            if start:
                self._check_range(response, what, first=start, end=None)
            elif response.status != 200 or (response.length is None and not response.chunked):
                raise other_answer(what)
            if (response.length or 0) > most_bytes:
                raise too_long(what, most_bytes)
            # The server may state any length, or none in a chunked answer.
            found = received(response, most_bytes + 1)
            if len(found) > most_bytes:
                raise too_long(what, most_bytes)
            if response.length:
                raise TransientError(f"the answer for {what} was cut off")
            return found

        headers = {"range": f"bytes={start}-"} if start else {}
        request = Request(method="GET", key=key, query={}, headers=headers, answer_bytes=WHOLE_BYTES)
        return self._exchange(lambda: request, what, receive, deadline_s)

    def put(self, key: str, data: bytes, condition: Condition | None, *, within_s: float) -> str:
        """See `Bucket`."""
        until_s = clock.monotonic_s() + within_s
        try:
            return self._put(key, data, condition, until_s)
        except ConditionError:
            # Ceph RGW 16 compares If-Match with the ETag without quotes, but returns it with quotes.
            version = condition.version if condition is not None else None
            if version is None or self.head(key, deadline_s=until_s).version != version:
                raise
            return self._put(key, data, Condition(version=version.strip('"')), until_s)

    def _put(self, key: str, data: bytes, condition: Condition | None, until_s: float) -> str:
        headers = {"content-md5": base64.b64encode(md5_of(data)).decode()}
        if condition is not None and condition.version is None:
            headers["if-none-match"] = "*"
        elif condition is not None and condition.version is not None:
            if not (condition.version.isascii() and condition.version.isprintable()):
                raise other_answer(self._what("PUT", key))  # an S3 server sends no such version
            headers["if-match"] = condition.version
        request = Request(method="PUT", key=key, query={}, headers=headers, body=data)
        answer = self._call(request, until_s, most_tries=1)
        with refusing_other_answers(self._what("PUT", key)):
            return identifier(answer.headers["ETag"])

    def upload(
        self,
        key: str,
        source: OpenFile | Content,
        *,
        fence: Callable[[], None] | None,
        progress: Progress | None,
        deadline_s: float | None,
    ) -> None:
        """See `Bucket`; an interrupted upload can be continued."""
        upload_in_parts(
            self,
            key,
            source,
            find=lambda: self._head_or_none(key, deadline_s),
            fence=fence,
            progress=progress,
            deadline_s=deadline_s,
        )

    def _head_or_none(self, key: str, deadline_s: float | None) -> StoredObject | None:
        try:
            return self.head(key, deadline_s=deadline_s)
        except ObjectNotFoundError:
            return None

    def delete(self, key: str, *, deadline_s: float | None) -> None:
        """See `Bucket`."""
        self._delete(key, {}, deadline_s)

    def sweep(
        self,
        prefix: str,
        *,
        only: Callable[[str], bool],
        keys: Iterable[str],
        begun_before_s: float | None,
        deadline_s: float | None,
    ) -> int:
        """See `Bucket`."""
        num_swept = 0
        unique = set[tuple[str, str]]()
        budget = self.budget(prefix, deadline_s)  # one for all listings: a mark may name thousands of large files

        def find(start: str) -> None:
            budget.check_time()
            for upload in self.find(start, deadline_s=deadline_s, budget=budget):
                if (begun_before_s is None or upload.begun_s < begun_before_s) and only(upload.key):
                    unique.add((upload.key, upload.upload_id))

        with ThreadPoolExecutor(_NUM_LISTINGS, thread_name_prefix="safepoint-sweep") as threads:
            # Raises the first error, and cancels the rest.
            list(threads.map(find, [prefix, *itertools.islice(filter(only, keys), _MOST_KEYS)]))
        for key, upload_id in unique:
            budget.check_time()
            try:
                self.abort(UploadId(key=key, upload_id=upload_id), deadline_s=deadline_s)
                num_swept += 1
            except ObjectNotFoundError:
                pass
            except AccessDeniedError as error:
                _log.warning("an unfinished upload of another user stays: %s", error)
        return num_swept
