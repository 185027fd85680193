"""The lines that connect an engine to a running platform, ready to be pasted.

A token is never among them: they name the variable that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from zombi_platform.catalog.place import Place
from zombi_platform.engines.spark.server import PACKAGES

TOKEN: Final = "$ZOMBI_TOKEN"
CREDENTIALS: Final = (
    "the bucket's credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)


def spark(place: Place, signed_in: bool) -> str:
    catalog = f"spark.sql.catalog.{place.warehouse}"
    conf = {
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "rest",
        f"{catalog}.uri": place.url,
        f"{catalog}.warehouse": place.warehouse,
        f"{catalog}.cache-enabled": "false",
    }
    notes = [
        "Spark 4.1, Iceberg 1.12",
        "cache-enabled=false: Spark would keep a table as it first loaded it, and not see what "
        "came after",
    ]
    if signed_in:
        conf[f"{catalog}.token"] = f'"{TOKEN}"'
    if place.storage:
        notes.append(CREDENTIALS)
    options = [f"--packages {','.join(PACKAGES)}"]
    options += [f"--conf {name}={value}" for name, value in conf.items()]
    return "\n".join(
        [
            *(f"# {note}" for note in notes),
            " \\\n  ".join(["spark-sql", *options]),
            f"# then: SELECT count(*) FROM {place.warehouse}.{place.namespace}.TABLE",
        ]
    )


def trino(place: Place, signed_in: bool) -> str:
    properties = {
        "connector.name": "iceberg",
        "iceberg.catalog.type": "rest",
        "iceberg.rest-catalog.uri": place.url,
        "iceberg.rest-catalog.warehouse": place.warehouse,
    }
    if signed_in:
        properties["iceberg.rest-catalog.security"] = "OAUTH2"
        properties["iceberg.rest-catalog.oauth2.token"] = "${ENV:ZOMBI_TOKEN}"
    if place.storage:
        properties["fs.native-s3.enabled"] = "true"
        properties["s3.region"] = place.storage["s3.region"]
        if "s3.endpoint" in place.storage:
            properties["s3.endpoint"] = place.storage["s3.endpoint"]
            properties["s3.path-style-access"] = "true"
    else:
        properties["fs.hadoop.enabled"] = "true"
    note = CREDENTIALS if place.storage else "every worker must see the warehouse's directory"
    return "\n".join(
        [
            f"# etc/catalog/{place.warehouse}.properties; {note}",
            *(f"{name}={value}" for name, value in properties.items()),
            f"# then: SELECT count(*) FROM {place.warehouse}.{place.namespace}.TABLE",
        ]
    )


def duckdb(place: Place, signed_in: bool) -> str:
    sign_in = "TOKEN getenv('ZOMBI_TOKEN')" if signed_in else "AUTHORIZATION_TYPE 'none'"
    shell = "-- DuckDB 1.5, its shell; elsewhere write the values in place of getenv(…)"
    lines = [shell, "INSTALL iceberg; LOAD iceberg; INSTALL httpfs; LOAD httpfs;"]
    if place.storage:
        options = [f"REGION '{place.storage['s3.region']}'"]
        if "s3.endpoint" in place.storage:
            scheme, _, host = place.storage["s3.endpoint"].partition("://")
            ssl = "true" if scheme == "https" else "false"
            options += [f"ENDPOINT '{host}'", "URL_STYLE 'path'", f"USE_SSL {ssl}"]
        options += ["KEY_ID getenv('AWS_ACCESS_KEY_ID')"]
        options += ["SECRET getenv('AWS_SECRET_ACCESS_KEY')"]
        lines.append(f"CREATE SECRET (TYPE s3, {', '.join(options)});")
    lines += [
        f"ATTACH '{place.warehouse}' AS {place.warehouse} "
        f"(TYPE iceberg, ENDPOINT '{place.url}', {sign_in});",
        f'USE {place.warehouse}."{place.namespace}";',
        "-- then: SELECT count(*) FROM TABLE; or, with nothing to install: zombi query",
    ]
    return "\n".join(lines)


def pyiceberg(place: Place, signed_in: bool) -> str:
    token = ', token=os.environ["ZOMBI_TOKEN"]' if signed_in else ""
    note = f"# {CREDENTIALS}\n" if place.storage else ""
    return (
        f"{note}import os\n"
        "from pyiceberg.catalog.rest import RestCatalog\n\n"
        f'catalog = RestCatalog("zombi", uri="{place.url}", '
        f'warehouse="{place.warehouse}"{token})\n'
        f'# then: catalog.load_table("{place.namespace}.TABLE").scan().to_arrow(), and load it '
        "again to see what is new"
    )


ENGINES: Final[Mapping[str, Callable[[Place, bool], str]]] = {
    "spark": spark,
    "trino": trino,
    "duckdb": duckdb,
    "pyiceberg": pyiceberg,
}
