"""/docs: the OpenAPI document as pages, from this machine alone.

FastAPI's own page loads its scripts from a host on the internet; these come from an
installed package, so that the documentation works wherever the gateway does.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html

from zombi_platform.errors import NotFoundError

ASSETS: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
ASSETS_PATH: Final = "/docs/assets/"


def documentation_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    folder = files("fastapi_offline") / "static"
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Zombi Platform",
        swagger_js_url=ASSETS_PATH + "swagger-ui-bundle.js",
        swagger_css_url=ASSETS_PATH + "swagger-ui.css",
        swagger_favicon_url=ASSETS_PATH + "favicon.png",
        swagger_ui_parameters={"defaultModelsExpandDepth": 0},
    )

    @router.get("/docs")
    async def show() -> Response:
        return page

    @router.get(ASSETS_PATH + "{name}")
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise NotFoundError(f"there is no {name[:100]!r}; see /docs")
        return Response((folder / name).read_bytes(), media_type=ASSETS[name])

    return router
