"""A page that describes the API, made of its OpenAPI document, with nothing from outside."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-size: 0.9em; } h2 { margin-top: 2.5rem; }
section { border-top: 1px solid #8885; padding: 0.5rem 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
.method { display: inline-block; min-width: 4.5rem; font-weight: 700; }
"""


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """Every endpoint with its parameters and the fields of its body."""
    return HTMLResponse(_page(request.app.openapi()))


def _page(document: dict[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["other"])[0]
            groups.setdefault(tag, []).append(_operation(path, method, operation))
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(sections)}" for tag, sections in groups.items())
    title = escape(document["info"]["title"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(document['info'].get('description', ''))} "
        '<a href="openapi.json">openapi.json</a></p>'
        f"{body}</body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        _row(it["name"], it["in"], it.get("schema", {}), it.get("description", ""))
        for it in operation.get("parameters", ())
    ]
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    rows += [
        _row(name, "body", field, field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    if rows:
        table = f"<details><summary>{len(rows)} fields</summary>{table}</details>"
    return (
        f'<section><span class="method">{escape(method.upper())}</span>'
        f"<code>{escape(path)}</code><p>{escape(operation.get('description', ''))}</p>"
        f"{table}</section>"
    )


def _row(name: str, where: str, schema: dict[str, Any], description: str) -> str:
    cells = (f"<code>{escape(name)}</code>", escape(where), escape(_kind(schema)))
    columns = "".join(f"<td>{cell}</td>" for cell in (*cells, escape(description)))
    return f"<tr>{columns}</tr>"


def _kind(schema: dict[str, Any]) -> str:
    kinds = [it.get("type", "any") for it in schema.get("anyOf", [schema])]
    return " or ".join(str(kind) for kind in kinds)
