"""Gets the pictures of a chat: reads uploaded files, and fetches URLs by the rules of webhooks."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from promptq.producer.batch_store.files import FileMissingError, FileStore
from promptq.producer.calls.call import CompletionCall
from promptq.producer.calls.caller import Caller, check_scope
from promptq.producer.calls.safe_http import AddressRefusedError, call
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.pictures import MAX_PICTURES, data_url, is_picture, picture_part
from promptq.shared.protocol.request import MAX_PAYLOAD_BYTES

_MOST_BYTES = MAX_PAYLOAD_BYTES * 3 // 4
"""The most bytes of all pictures of a call. As base64, they need a third more."""
_LONGEST_URL = 2048
_FILE = "file-"
_NOT_HERE = ("http://", "https://", _FILE)
_TIMEOUT = 5.0
_MOST_SECONDS = 30.0
_NUM_TENANTS = 8
"""Number of tenants whose pictures are fetched at once."""
_REFUSALS = (AddressRefusedError, FileMissingError)
_HEADERS = {"user-agent": "promptq", "accept": "image/png, image/jpeg, image/gif, image/webp"}


class PicturesNeededError(InvalidRequestError):
    """The call has pictures at `urls`, which were not fetched yet."""

    def __init__(self, urls: Sequence[str], field: str) -> None:
        super().__init__(f"{field}: a picture must have a data URL here", field)
        self.urls = urls


def with_pictures(chat: CompletionCall, fetched: Mapping[str, str]) -> CompletionCall:
    """Returns the call with a data URL from `fetched` in place of each picture's http(s) URL or
    file id. Raises PicturesNeededError if `fetched` lacks a picture."""
    urls = _urls_in(chat.fields.get("messages"))
    if missing := [*dict.fromkeys(url for url in urls if url not in fetched)]:
        raise PicturesNeededError(missing, chat.names.get("messages", "messages"))
    if not urls:
        return chat
    messages = [
        {**message, "content": [_fetched_part(part, fetched) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in chat.fields["messages"]
    ]
    return chat.with_fields(messages=messages)


def _urls_in(messages: Any) -> list[str]:
    messages = messages if isinstance(messages, list) else ()  # others are refused later
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [url for part in parts if (url := _url_of(part)) is not None]


def _fetched_part(part: Any, fetched: Mapping[str, str]) -> Any:
    url = _url_of(part)
    return part if url is None else picture_part(fetched[url])


def _url_of(part: Any) -> str | None:
    """Returns the http(s) URL or the file id of a picture; None for any other part of a message."""
    if not is_picture(part):
        return None
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    is_remote = isinstance(url, str) and url.startswith(_NOT_HERE)
    return url if is_remote else None


class PictureFetcher:
    """Gets pictures in threads, for at most `calls_at_once` calls of each tenant at a time."""

    def __init__(self, files: FileStore | None, calls_at_once: int = 1) -> None:
        self._files = files
        self._calls_at_once = calls_at_once
        self._threads = ThreadPoolExecutor(_NUM_TENANTS * calls_at_once, "pictures")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def fetch(
        self, urls: Sequence[str], field: str, caller: Caller, *, allow_private: bool = False
    ) -> dict[str, str]:
        """Returns a data URL for each URL or file id. Raises InvalidRequestError, which names the
        field, and ApiError 403 for a file if the caller may not read files."""
        if len(urls) > MAX_PICTURES:
            raise InvalidRequestError(
                f"{field}: {len(urls)} pictures are more than the {MAX_PICTURES} allowed", field
            )
        loop, found, left = asyncio.get_running_loop(), dict[str, str](), _MOST_BYTES
        url = ""
        try:
            async with (
                self._turns.setdefault(caller.party, asyncio.Semaphore(self._calls_at_once)),
                asyncio.timeout(_MOST_SECONDS),
            ):
                for url in urls:
                    if url.startswith(_FILE):
                        check_scope(caller, "files")
                        get = partial(self._read, url, left, caller)
                    else:
                        get = partial(_get, url, left, allow_private=allow_private)
                    content = await loop.run_in_executor(self._threads, get)
                    left -= len(content)
                    found[url] = data_url(content)
        except (ValueError, OSError, http.client.HTTPException, *_REFUSALS) as error:
            why = str(error) or "it did not answer in time"
            raise InvalidRequestError(
                f"{field}: the picture at {url[:80]!r} cannot be fetched: {why}", field
            ) from None
        return found

    def _read(self, file_id: str, most_bytes: int, caller: Caller) -> bytes:
        if self._files is None:
            raise FileMissingError("there are no uploaded files here")
        stored = self._files.get(file_id, *caller.reach)
        _check_size(stored.bytes, most_bytes)
        return self._files.path(stored).read_bytes()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _get(url: str, most_bytes: int, *, allow_private: bool) -> bytes:
    """Returns the content of a URL. Raises ValueError, and the errors of `call`."""
    if len(url) > _LONGEST_URL:
        raise ValueError(f"the URL is longer than {_LONGEST_URL} characters")
    status, content = call(
        "GET", url, None, _HEADERS,
        timeout=_TIMEOUT, allow_private=allow_private, most_bytes=most_bytes + 1,
    )  # fmt: skip
    if 300 <= status < 400:
        raise ValueError("the server redirects, which is not followed")
    if status != 200:
        raise ValueError(f"the server answered {status}")
    _check_size(len(content), most_bytes)
    return content


def _check_size(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise ValueError(f"the pictures have more than {_MOST_BYTES} bytes in all")
