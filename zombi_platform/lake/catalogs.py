"""Opens the catalog that the settings name; the rest of the lake only sees pyiceberg's interface.

All catalogs read and write files through `StorageIO`. Their failures are translated here,
so that nobody else needs to know what HTTP or database library is below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import requests
from pyiceberg import exceptions as iceberg_errors
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from requests.adapters import HTTPAdapter

from zombi_platform.errors import (
    LakeRefusedError,
    LakeUnavailableError,
    SettingsError,
    ZombiError,
)
from zombi_platform.lake.file_io import io_properties
from zombi_platform.lake.filesystem_catalog import FilesystemCatalog
from zombi_platform.lake.storage import Storage
from zombi_platform.settings import Settings

NAME: Final = "zombi"
NESSIE: Final = "nessie.is-nessie-catalog"

VERDICTS: Final = (
    iceberg_errors.NoSuchTableError,
    iceberg_errors.NoSuchNamespaceError,
    iceberg_errors.TableAlreadyExistsError,
    iceberg_errors.NamespaceAlreadyExistsError,
    iceberg_errors.CommitFailedException,
)
"""Answers, not failures: callers decide by them."""

REFUSALS: Final = (
    iceberg_errors.UnauthorizedError,
    iceberg_errors.ForbiddenError,
    iceberg_errors.AuthorizationExpiredError,
    iceberg_errors.OAuthError,
)


PASSWORD: Final = re.compile(r"//[^/@]*@")
"""What stands before the host in an address and must not stand in a message."""

CLIENTS: Final = frozenset(
    {"pyiceberg", "requests", "sqlalchemy", "botocore", "thrift", "hive_metastore"}
)
"""Packages whose errors mean that a catalog did not do its part."""


def open_catalog(settings: Settings, storage: Storage) -> Catalog:
    """The catalog that commits are made in."""
    if settings.catalog == "filesystem":
        return FilesystemCatalog(storage, settings.catalog_namespace, settings.delete_grace_secs)
    properties = {"warehouse": storage.warehouse, **io_properties(storage)}
    if settings.catalog == "rest":
        opened = open_rest_catalog(
            _uri(settings), settings, storage, {"warehouse": settings.catalog_warehouse}
        )
        _refuse_nessie(opened)
        return opened
    if settings.catalog in ("sql", "hive"):
        properties["uri"] = _uri(settings)
    if settings.catalog == "glue":
        properties["glue.region"] = settings.s3_region
    try:
        return _open(settings, properties)
    except LakeUnavailableError:
        # Of two who open a new database at once, one fails to make what the other has made.
        return _open(settings, properties)


def _refuse_nessie(catalog: Catalog) -> None:
    """Nessie takes two first commits to a table, of which one is lost without a word."""
    if catalog.properties.get(NESSIE) == "true":
        raise SettingsError(
            "ZOMBI_CATALOG_URI is a Nessie server, which does not check that a table is still "
            "without a snapshot and keeps no history, so events could be lost: use another "
            "catalog for commits"
        )


def _open(settings: Settings, properties: Mapping[str, str]) -> Catalog:
    with catalog_errors(settings.catalog_uri or settings.catalog):
        try:
            return load_catalog(NAME, type=settings.catalog, **properties)
        except (ImportError, iceberg_errors.NotInstalledError) as error:
            raise SettingsError(
                f"ZOMBI_CATALOG={settings.catalog} with this ZOMBI_CATALOG_URI needs a package "
                f"that is not installed: {error}"
            ) from error


def ensure_namespace(catalog: Catalog, namespace: str) -> None:
    """Make the namespace unless it is there, or somebody makes it at the same time."""
    try:
        catalog.create_namespace_if_not_exists(namespace)
    except Exception:
        # How a catalog says "there already" is not the same in all of them.
        if not catalog.namespace_exists(namespace):
            raise


def open_rest_catalog(
    uri: str, settings: Settings, storage: Storage, properties: dict[str, str | None]
) -> Catalog:
    """A catalog behind HTTP, ours or an external one, each request limited in time."""
    given = {**properties, "token": settings.catalog_token}
    with catalog_errors(uri):
        return _BoundedRestCatalog(
            NAME,
            uri=uri,
            timeout_secs=settings.s3_timeout_secs,
            **{name: value for name, value in given.items() if value is not None},
            **io_properties(storage),
        )


@contextmanager
def catalog_errors(uri: str) -> Iterator[None]:
    """Turn what catalogs raise inside into errors of this platform, except their verdicts."""
    name = PASSWORD.sub("//", uri)
    try:
        yield
    except (*VERDICTS, ZombiError, FileNotFoundError):
        raise
    except REFUSALS as error:
        raise LakeRefusedError(
            f"the catalog {name} refuses: {error}; correct ZOMBI_CATALOG_TOKEN",
            code="CATALOG_REFUSED",
        ) from error
    except requests.exceptions.Timeout as error:
        raise LakeUnavailableError(
            f"the catalog {name} did not answer in time (ZOMBI_S3_TIMEOUT_SECS)",
            code="CATALOG_TIMEOUT",
        ) from error
    except Exception as error:
        # Databases, metastores and clouds each have a tree of their own; all that matters
        # here is that the outcome is unknown and that asking again may help.
        if type(error).__module__.partition(".")[0] not in CLIENTS:
            raise
        raise LakeUnavailableError(
            f"the catalog {name} failed: {type(error).__name__}: {error}", code="CATALOG_FAILED"
        ) from error


def _uri(settings: Settings) -> str:
    if settings.catalog_uri is None:
        raise SettingsError(
            f"ZOMBI_CATALOG={settings.catalog} needs ZOMBI_CATALOG_URI, the catalog's address"
        )
    return settings.catalog_uri


class _BoundedRestCatalog(RestCatalog):
    """pyiceberg sets no time limit, so a catalog that hangs would hang every worker.

    `_create_session` is not public; a test with a catalog that never answers notices if
    it is no longer called.
    """

    def __init__(self, name: str, *, timeout_secs: float, **properties: Any) -> None:
        self._timeout_secs = timeout_secs
        super().__init__(name, **properties)

    def _create_session(self) -> requests.Session:
        session = super()._create_session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, _BoundedAdapter(self._timeout_secs))
        return session


class _BoundedAdapter(HTTPAdapter):
    def __init__(self, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        super().__init__()

    def send(self, request: Any, *args: Any, **options: Any) -> requests.Response:
        options["timeout"] = self._timeout_secs
        return super().send(request, *args, **options)
