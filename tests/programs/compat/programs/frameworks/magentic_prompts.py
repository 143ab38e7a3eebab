"""magentic: functions whose answer a model writes, as text, as objects and as calls.

magentic needs the return types of functions. So this module must not import `annotations` from
`__future__`, which would turn the types into texts.
"""

from typing import Any, Literal

import trying
from magentic import (
    AsyncStreamedStr,
    FunctionCall,
    OpenaiChatModel,
    StreamedStr,
    SystemMessage,
    UserMessage,
    chatprompt,
)
from tales import Tale
from trying import attempt, is_tale, same


def paint(hero: Literal["fox", "hare", "owl"], friends: Literal[1, 2, 3]) -> Any:
    """Paint a hero."""
    return {"hero": hero, "friends": friends}


def asked(name: str = trying.MODEL, most: int = trying.MAX_TOKENS, **fields: Any) -> Any:
    model = OpenaiChatModel(name, base_url=trying.URL, max_tokens=most, temperature=0)
    question = UserMessage("{question}")
    return chatprompt(SystemMessage(trying.SYSTEM), question, model=model, **fields)


@attempt("text")
def _() -> str:
    @asked()
    def tell(question: str) -> str: ...

    got = tell(trying.QUESTION)
    same("text", got, trying.chat().text)
    return got


@attempt("streamed text")
def _() -> str:
    @asked()
    def tell(question: str) -> StreamedStr: ...

    pieces = list(tell(trying.QUESTION))
    assert len(pieces) > 2, f"only {len(pieces)} pieces"
    same("text", "".join(pieces), trying.chat().text)
    return f"{len(pieces)} pieces"


@attempt("streamed text, asynchronous")
async def _() -> str:
    @asked()
    async def tell(question: str) -> AsyncStreamedStr: ...

    pieces = [piece async for piece in await tell(trying.QUESTION)]
    same("text", "".join(pieces), trying.chat().text)
    return f"{len(pieces)} pieces"


@attempt("an object of a class")
def _() -> str:
    @asked(most=200)
    def tell(question: str) -> Tale: ...

    got = tell(trying.QUESTION)
    is_tale(got)
    return repr(got)


@attempt("a call of a function")
def _() -> str:
    @asked(most=200, functions=[paint])
    def tell(question: str) -> FunctionCall[Any]: ...

    got = tell(trying.QUESTION)()
    is_tale(got)
    return str(got)


@attempt("error: unknown model")
def _() -> str:
    @asked(trying.UNKNOWN)
    def tell(question: str) -> str: ...

    return trying.fails(lambda: tell(trying.QUESTION), "NotFoundError", *trying.UNKNOWN_SAYS)


@attempt("error: prompt too long")
def _() -> str:
    @asked()
    def tell(question: str) -> str: ...

    return trying.fails(lambda: tell(trying.LONG), "BadRequestError", *trying.LONG_SAYS)
