"""Serves the OpenAPI document, and a page built from it. The page loads nothing from other servers.

Callers need no key, so the document and the page are built only once, to limit the cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, Response

router = APIRouter(include_in_schema=False)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-size: 0.9em; } h2 { margin-top: 2.5rem; } summary { cursor: pointer; }
section { border-top: 1px solid #8885; padding: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; margin-bottom: 0.5rem; }
td { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
.method { display: inline-block; min-width: 5.5rem; font-weight: 700; }
@media (max-width: 40rem) {
  tr { display: block; padding: 0.3rem 0; }
  td { display: inline; padding: 0 0.5rem 0 0; overflow-wrap: anywhere; }
}
"""


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """The API as a page: each endpoint's parameters, fields of its body and errors."""
    return HTMLResponse(_made_once(request.app, _page))


@router.api_route("/openapi.json", methods=["GET", "HEAD"])
async def openapi(request: Request) -> Response:
    """The API as an OpenAPI document."""
    return Response(_made_once(request.app, _document), media_type="application/json")


def _made_once(app: FastAPI, make: Callable[[dict[str, Any]], str]) -> bytes:
    kept: dict[Callable[[dict[str, Any]], str], bytes] = app.state.descriptions
    if make not in kept:
        kept[make] = make(app.openapi()).encode()
    return kept[make]


def _document(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def _page(document: dict[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["other"])[0]
            groups.setdefault(tag, []).append(_operation(path, method, operation, document))
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(sections)}" for tag, sections in groups.items())
    title = escape(document["info"]["title"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="dashboard/files/icon.svg" type="image/svg+xml">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{_text(document['info'].get('description', ''))} "
        '<a href="openapi.json">openapi.json</a>, <a href="./">dashboard</a></p>'
        f"{body}</body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    fields = [
        _row(
            parameter["name"],
            parameter["in"],
            _kind(parameter.get("schema", {})),
            parameter.get("description", ""),
        )
        for parameter in operation.get("parameters", ())
    ]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        properties: dict[str, Any] = {}
        for schema in content["schema"].get("anyOf", [content["schema"]]):
            properties |= _resolved(schema, document)["properties"]
        fields += [
            _row(name, "body", _kind(field), field.get("description", ""))
            for name, field in properties.items()
        ]
    errors = [
        _row(status, answer["description"])
        for status, answer in sorted(operation["responses"].items())
        if status not in ("200", "default")
    ]
    return (
        f'<section><span class="method">{escape(method.upper())}</span>'
        f"<code>{escape(path)}</code><p>{_text(operation.get('description', ''))}</p>"
        f"{_table('field', fields)}{_table('error', errors)}</section>"
    )


def _table(what: str, rows: Sequence[str]) -> str:
    if not rows:
        return ""
    title = f"{len(rows)} {what}{'s' * (len(rows) > 1)}"
    return f"<details><summary>{title}</summary><table>{''.join(rows)}</table></details>"


def _row(name: str, *cells: str) -> str:
    columns = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    return f"<tr><td><code>{escape(name)}</code></td>{columns}</tr>"


def _text(text: str) -> str:
    return re.sub("`(.+?)`", r"<code>\1</code>", escape(text))


def _resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    part: dict[str, Any] = document["components"]["schemas"][name] if name else schema
    return part


def _kind(schema: dict[str, Any]) -> str:
    kinds = [
        choice.get("type", "object" if "$ref" in choice else "any")
        for choice in schema.get("anyOf", [schema])
    ]
    return " or ".join(str(kind) for kind in kinds)
