"""What the tests of the catalog share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.catalog.tables import HTTP


@pytest.fixture(scope="session", autouse=True)
def http() -> Iterator[None]:
    """Close the connections that the tests kept open."""
    yield
    HTTP.close()
