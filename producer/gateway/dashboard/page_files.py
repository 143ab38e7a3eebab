"""Serves the dashboard's page, with its scripts and styles. The page's data is in pages.py."""

from __future__ import annotations

from functools import cache
from importlib import resources

from fastapi import APIRouter, Response

from promptq.producer.calls.errors import ApiError

router = APIRouter(include_in_schema=False)

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOLDERS = ("", "pages/", "shared/")
_HEADERS = {
    # The page may load only files of this gateway, and has no scripts or styles inside it. Browsers
    # that support trusted types refuse to read text as HTML.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def _files() -> dict[str, bytes]:
    static = resources.files("promptq.producer.gateway.dashboard") / "static"
    return {
        f"{folder}{file.name}": file.read_bytes()
        for folder in _FOLDERS
        for file in (static / folder).iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    }


@router.get("/favicon.ico")
async def favicon() -> Response:
    """The gateway's icon, for pages that name no icon."""
    return await file("icon.svg")


@router.get("/")
async def page() -> Response:
    """The dashboard's only page. It contains no data, so callers need no key."""
    return await file("index.html")


@router.get("/dashboard/files/{name:path}")
async def file(name: str) -> Response:
    """A script or style of the page."""
    content = _files().get(name)
    if content is None:
        raise ApiError(404, f"there is no file {name!r}")
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)
