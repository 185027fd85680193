"""The lake in an S3 bucket: small files with boto3, large ones and ranges with pyarrow.

boto3 is asked for one try at a time, because the waits between tries, their number and
the time of all together are settings here. A conditional create whose answer was lost is
read back: content is unique to its writer, so equal content means that it was ours.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import boto3
from botocore import exceptions as boto_errors
from botocore.config import Config
from pyarrow import fs

from zombi_platform.errors import LakeRefusedError, LakeUnavailableError, ZombiError
from zombi_platform.lake.storage import Stored

if TYPE_CHECKING:
    from zombi_platform.lake.storage import Storage

T = TypeVar("T")

CONNECT_TIMEOUT_SECS_MAX: Final = 5.0
ARROW_TRIES_MAX: Final = 3
"""Each of pyarrow's tries may take the whole time limit, so there are few."""
DELETE_BATCH: Final = 1000
"""Keys in one DeleteObjects request, the most that S3 allows."""

NOT_THERE: Final = frozenset({"NoSuchKey", "404", "NotFound"})
THERE_ALREADY: Final = frozenset({"PreconditionFailed", "412"})
RACING: Final = frozenset({"ConditionalRequestConflict", "409"})
"""Another create of the same key is under way: who wins is known at the next try."""

REFUSALS: Final = {
    "NoSuchBucket": (
        "BUCKET_MISSING",
        "there is no bucket {bucket!r} at {endpoint}: create it, or correct ZOMBI_S3_BUCKET",
    ),
    "InvalidAccessKeyId": (
        "CREDENTIALS_WRONG",
        "{endpoint} does not know the access key: correct AWS_ACCESS_KEY_ID",
    ),
    # What versitygw says instead.
    "XAdminUserNotFound": (
        "CREDENTIALS_WRONG",
        "{endpoint} does not know the access key: correct AWS_ACCESS_KEY_ID",
    ),
    "SignatureDoesNotMatch": (
        "CREDENTIALS_WRONG",
        "the secret key does not fit the access key at {endpoint}: correct AWS_SECRET_ACCESS_KEY",
    ),
    "ExpiredToken": (
        "CREDENTIALS_WRONG",
        "the session token for {endpoint} has expired: renew AWS_SESSION_TOKEN",
    ),
    "InvalidToken": (
        "CREDENTIALS_WRONG",
        "{endpoint} does not take the session token: correct AWS_SESSION_TOKEN",
    ),
    "AccessDenied": (
        "ACCESS_DENIED",
        "the credentials are valid but may not use {location} at {endpoint}: "
        "allow them to list, read, write and delete there",
    ),
    "AuthorizationHeaderMalformed": (
        "REGION_WRONG",
        "{bucket!r} is not in region {region!r}: correct ZOMBI_S3_REGION",
    ),
    "PermanentRedirect": (
        "REGION_WRONG",
        "{bucket!r} is not in region {region!r}: correct ZOMBI_S3_REGION",
    ),
    "RequestTimeTooSkewed": (
        "CLOCK_WRONG",
        "this machine's clock is too far from that of {endpoint}: correct it",
    ),
}
"""Codes of S3 that no retry cures: our code, and what to say."""

ARROW_NAMES: Final = {
    "NO_SUCH_BUCKET": "NoSuchBucket",
    "INVALID_ACCESS_KEY_ID": "InvalidAccessKeyId",
    "SIGNATURE_DOES_NOT_MATCH": "SignatureDoesNotMatch",
    "ACCESS_DENIED": "AccessDenied",
    "INVALID_CLIENT_TOKEN_ID": "InvalidToken",
    "EXPIRED_TOKEN": "ExpiredToken",
    "XAdminUserNotFound": "XAdminUserNotFound",
}
"""The same errors as pyarrow's AWS library spells them."""


class ObjectStore:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._bucket = storage.warehouse.removeprefix("s3://").partition("/")[0]
        self._client = boto3.session.Session().client(
            "s3",
            endpoint_url=storage.endpoint,
            region_name=storage.region,
            config=Config(
                connect_timeout=min(CONNECT_TIMEOUT_SECS_MAX, storage.timeout_secs),
                read_timeout=storage.timeout_secs,
                retries={"total_max_attempts": 1},
                # Servers other than AWS refuse the checksums that newer clients add.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                max_pool_connections=32,
            ),
        )
        self._filesystem: fs.FileSystem | None = None

    def read(self, location: str) -> bytes:
        bucket, key = _split(location)

        def get() -> bytes:
            body: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
            return body

        return self._call(get, location)

    def create(self, location: str, content: bytes) -> None:
        bucket, key = _split(location)
        asked_before = False

        def put() -> None:
            nonlocal asked_before
            again, asked_before = asked_before, True
            try:
                self._client.put_object(Bucket=bucket, Key=key, Body=content, IfNoneMatch="*")
            except boto_errors.ClientError as error:
                if not (again and _code(error) in THERE_ALREADY and self._holds(location, content)):
                    raise

        try:
            self._call(put, location)
        except LakeUnavailableError:
            # The last answer may be the one that was lost.
            if not self._holds(location, content):
                raise

    def write(self, location: str, content: bytes) -> None:
        bucket, key = _split(location)
        self._call(lambda: self._client.put_object(Bucket=bucket, Key=key, Body=content), location)

    def write_lazily(self, location: str, content: bytes) -> None:
        self.write(location, content)

    def find(self, location: str) -> Stored | None:
        # A listing, not HEAD: its errors come with a body that says what is wrong.
        return next((found for found in self.files(location) if found.location == location), None)

    def files(self, prefix: str) -> Iterator[Stored]:
        bucket, key = _split(prefix)
        for page in self._pages(prefix, Bucket=bucket, Prefix=key):
            for entry in page.get("Contents", ()):
                yield Stored(
                    f"s3://{bucket}/{entry['Key']}",
                    entry["Size"],
                    int(entry["LastModified"].timestamp() * 1000),
                )

    def names(self, prefix: str) -> list[str]:
        bucket, key = _split(prefix)
        directory = key[: key.rfind("/") + 1]
        return [
            entry["Key"].removeprefix(directory)
            for page in self._pages(prefix, Bucket=bucket, Prefix=key, Delimiter="/")
            for entry in page.get("Contents", ())
        ]

    def directories(self, directory: str) -> list[str]:
        bucket, key = _split(directory + "/")
        return [
            found["Prefix"].removeprefix(key).rstrip("/")
            for page in self._pages(directory, Bucket=bucket, Prefix=key, Delimiter="/")
            for found in page.get("CommonPrefixes", ())
        ]

    def delete(self, locations: Sequence[str]) -> None:
        keys = [_split(location)[1] for location in locations]
        for start in range(0, len(keys), DELETE_BATCH):
            batch = keys[start : start + DELETE_BATCH]
            self._call(partial(self._delete_batch, batch), locations[start])

    def path(self, location: str) -> str:
        return location.removeprefix("s3://").removeprefix("s3a://")

    def filesystem(self) -> fs.FileSystem:
        if self._filesystem is None:
            storage = self._storage
            scheme, _, host = (storage.endpoint or "").rpartition("://")
            self._filesystem = fs.S3FileSystem(
                endpoint_override=host or None,
                scheme=scheme or "https",
                region=storage.region,
                connect_timeout=min(CONNECT_TIMEOUT_SECS_MAX, storage.timeout_secs),
                request_timeout=storage.timeout_secs,
                retry_strategy=fs.AwsStandardS3RetryStrategy(
                    max_attempts=min(storage.tries, ARROW_TRIES_MAX)
                ),
            )
        return self._filesystem

    @contextmanager
    def output(self, location: str) -> Iterator[Any]:
        with self.filesystem().open_output_stream(self.path(location)) as sink:
            yield sink

    @contextmanager
    def errors(self, location: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except boto_errors.BotoCoreError as error:
            raise self._translated_local(error, location) from error
        except OSError as error:
            raise self._translated_arrow(error, location) from error

    def check(self, *, exclusive: bool) -> None:
        probe = f"{self._storage.warehouse}/.zombi-check-{time.time_ns():x}"
        self.create(probe, b"first")
        try:
            if not exclusive:
                return
            self.create(probe, b"second")
        except FileExistsError:
            return
        finally:
            self.delete([probe])
        raise LakeRefusedError(
            f"{self._endpoint} ignores `If-None-Match: *`: it replaces a file that must not be "
            "replaced, so two commits could overwrite each other. Use a store that honours it, or "
            "a catalog other than `filesystem` (ZOMBI_CATALOG)",
            code="STORE_UNSAFE",
        )

    def _pages(self, location: str, **request: Any) -> Iterator[dict[str, Any]]:
        while True:
            ask = partial(self._client.list_objects_v2, **request)
            page: dict[str, Any] = self._call(ask, location)
            yield page
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def _delete_batch(self, keys: Sequence[str]) -> None:
        answer = self._client.delete_objects(
            Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
        )
        for failed in answer.get("Errors", ()):
            if failed.get("Code") not in NOT_THERE:
                raise boto_errors.ClientError({"Error": failed}, "DeleteObjects")

    def _holds(self, location: str, content: bytes) -> bool:
        try:
            return self.read(location) == content
        except FileNotFoundError:
            return False

    def _call(self, request: Callable[[], T], location: str) -> T:
        """Ask until it answers, the tries are used up, or the time is."""
        storage = self._storage
        deadline = time.monotonic() + storage.timeout_secs
        for attempt in range(1, storage.tries + 1):
            try:
                return request()
            except boto_errors.ClientError as error:
                raised: Exception = error
                failure = self._translated_answer(error, location)
            except boto_errors.BotoCoreError as error:
                raised = error
                failure = self._translated_local(error, location)
            wait_ms = min(storage.backoff_initial_ms * 2 ** (attempt - 1), storage.backoff_max_ms)
            wait_secs = random.uniform(0.5, 1.0) * wait_ms / 1000
            out_of_time = time.monotonic() + wait_secs >= deadline
            if (
                attempt == storage.tries
                or out_of_time
                or not isinstance(failure, LakeUnavailableError)
            ):
                raise failure from raised
            time.sleep(wait_secs)
        raise AssertionError("a Storage has at least one try")

    def _translated_answer(
        self, error: boto_errors.ClientError, location: str
    ) -> ZombiError | OSError:
        code = _code(error)
        if code in NOT_THERE:
            return FileNotFoundError(location)
        if code in THERE_ALREADY:
            return FileExistsError(location)
        refusal = self._refusal(code, location)
        if refusal is None and error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (
            401,
            403,
        ):
            refusal = LakeRefusedError(
                f"{self._endpoint} refuses {location}: {error}; correct the credentials or what "
                "they may do",
                code="ACCESS_DENIED",
            )
        return refusal or LakeUnavailableError(
            f"{self._endpoint} failed at {location}: {error}", code="STORE_FAILED"
        )

    def _translated_local(self, error: boto_errors.BotoCoreError, location: str) -> ZombiError:
        if isinstance(error, boto_errors.NoCredentialsError | boto_errors.PartialCredentialsError):
            return LakeRefusedError(
                f"no credentials for {self._endpoint}: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, a profile or a role",
                code="CREDENTIALS_MISSING",
            )
        if isinstance(error, boto_errors.ConnectTimeoutError | boto_errors.ReadTimeoutError):
            return LakeUnavailableError(
                f"{self._endpoint} did not answer within {self._storage.timeout_secs:g} s "
                f"(ZOMBI_S3_TIMEOUT_SECS) about {location}",
                code="STORE_TIMEOUT",
            )
        if isinstance(error, boto_errors.HTTPClientError | boto_errors.EndpointConnectionError):
            return LakeUnavailableError(
                f"{self._endpoint} cannot be reached: {error}", code="STORE_UNREACHABLE"
            )
        return LakeRefusedError(f"{location}: {error}")

    def _translated_arrow(self, error: OSError, location: str) -> ZombiError:
        text = str(error)
        for name, code in ARROW_NAMES.items():
            if f"AWS Error {name} " in text or f"ExceptionName: {name} " in text:
                refusal = self._refusal(code, location)
                assert refusal is not None
                return refusal
        return LakeUnavailableError(
            f"{self._endpoint} failed at {location}: {text}", code="STORE_FAILED"
        )

    def _refusal(self, code: str, location: str) -> LakeRefusedError | None:
        if code not in REFUSALS:
            return None
        ours, text = REFUSALS[code]
        filled = text.format(
            bucket=self._bucket,
            endpoint=self._endpoint,
            location=location,
            region=self._storage.region,
        )
        return LakeRefusedError(filled, code=ours)

    @property
    def _endpoint(self) -> str:
        return self._storage.endpoint or f"S3 in {self._storage.region}"


def _split(location: str) -> tuple[str, str]:
    bucket, _, key = location.removeprefix("s3://").removeprefix("s3a://").partition("/")
    return bucket, key


def _code(error: boto_errors.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
