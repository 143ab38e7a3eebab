"""Who may see and steer the whole queue, and from where."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from producer.gateway.access import ThisCaller
from producer.gateway.errors import ApiError


async def admin_of(caller: ThisCaller) -> ThisCaller:
    """Raises ApiError 403 for whoever may only use the queue."""
    if not caller.is_admin:
        raise ApiError(403, "this key may not see or steer the queue", code="not_admin")
    return caller


ThisAdmin = Annotated[ThisCaller, Depends(admin_of)]
"""A route's parameter of this type keeps everybody else out."""


async def same_origin(request: Request) -> None:
    """Keep other web sites from acting through the browser of somebody who may.

    Without a key a gateway on this machine trusts everybody on it, and so every page that a browser
    here shows. Browsers say where a request comes from; programs do not, and are no concern here.
    Raises ApiError 403.
    """
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ApiError(403, "another web site may not do this", code="cross_site")
