"""Renders chats as text with the chat template of a model, within limits of time and memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.request import TEMPLATE_CALL_ARGUMENTS, Request
from promptq.worker.text.content_form import (
    Message,
    Tools,
    in_form,
    mark_of_picture,
    reads_parts,
)
from promptq.worker.text.template_fields import with_fields_of
from promptq.worker.text.template_time_limit import CpuTimeLimitError, cpu_time_limit

RENDER_SECONDS = 1.0
"""The most CPU seconds that a chat template may take for one request. The template loops over
messages that may come from a stranger."""

MAX_REASON = 300
"""The most characters that an error message quotes from the error message of a library."""


@contextmanager
def _limits() -> Iterator[None]:
    """Limits a template's time and memory. Raises InvalidRequestError if the template fails."""
    try:
        from promptq.worker.text import template_size_limit  # and jinja2 with it

        with (
            template_size_limit.size_limit(),
            cpu_time_limit(RENDER_SECONDS, template_size_limit.__file__),
        ):
            yield
    except CpuTimeLimitError as error:
        raise InvalidRequestError(
            "messages: take too long to render: the model's chat template needs more than"
            f" {RENDER_SECONDS:g} s",
            field="messages",
        ) from error
    except Exception as error:  # the template is the model's code and may raise anything
        raise InvalidRequestError(
            f"messages: the model's chat template refuses them: {str(error)[:MAX_REASON]}",
            field="messages",
        ) from error


class ChatRenderer:
    """Renders chats with the chat templates of a `transformers` tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._reads_parts: dict[tuple[str, bool], dict[str, bool]] = {}
        """Results of `reads_parts`, by template and whether the chat has tools."""
        self._marks: dict[str, str] = {}
        """Results of `mark_of_picture`, by template."""

    def template(self, *, with_tools: bool) -> str:
        """Returns the chat template for requests with or without tools; empty if there is none.
        Chooses among a model's named templates as transformers and llama.cpp do."""
        templates = self._tokenizer.chat_template or ""
        if not isinstance(templates, dict):
            return str(templates)
        default = templates.get("default", "")
        return str(templates.get("tool_use", default) if with_tools else default)

    @property
    def response_template(self) -> Any:
        """The model's template for parsing outputs, as transformers reads it; None without one."""
        return getattr(self._tokenizer, "response_template", None)

    def render(self, request: Request) -> str:
        """Returns the messages as text, rendered by the model's chat template. Raises
        InvalidRequestError if the template fails, or exceeds a limit."""
        arguments = request.chat_template_kwargs or {}
        if arguments and (names := self._call_arguments.intersection(arguments)):
            name = min(names)
            raise InvalidRequestError(
                f"chat_template_kwargs: {name!r} is no variable of the chat template, but an"
                " argument of the call that renders it, which a request may not set",
                field="chat_template_kwargs",
            )
        tools = None if request.tool_choice == "none" else request.tools or None
        template = self.template(with_tools=tools is not None)
        if not template:
            only = " without tools" if self.template(with_tools=True) else ""
            raise InvalidRequestError(
                f"messages: the model has no chat template for chats{only}; send"
                f" {'tools, or ' * bool(only)}a prompt",
                field="messages",
            )
        with _limits():
            write = partial(self._written, template)
            key = template, tools is not None
            if key not in self._reads_parts:
                self._reads_parts[key] = reads_parts(write, with_tools=tools is not None)
            messages = with_fields_of(template, request.messages or ())
            messages = in_form(messages, self._reads_parts[key])
            return write(messages, tools, **arguments)

    def mark_of_picture(self, request: Request) -> str:
        """Returns the text that the request's chat template writes for each picture; empty if the
        template writes none."""
        template = self.template(with_tools=bool(request.tools) and request.tool_choice != "none")
        if template not in self._marks:
            with _limits():
                write = partial(self._written, template, tools=None)
                self._marks[template] = mark_of_picture(write)
        return self._marks[template]

    def _written(
        self, template: str, messages: list[Message], /, tools: Tools | None, **arguments: Any
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
            **arguments,
        )
        return text

    @cached_property
    def _call_arguments(self) -> frozenset[str]:
        """Arguments of `apply_chat_template`, which a request may not set."""
        call = inspect.signature(self._tokenizer.apply_chat_template)
        return TEMPLATE_CALL_ARGUMENTS.union(call.parameters, self._tokenizer.special_tokens_map)
