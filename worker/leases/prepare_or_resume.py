"""Turns a claim into a prepared request: parses and checks the payload, renders the chat,
tokenises, and compiles the grammar.

The request may come from a stranger, so each part's size is checked before the part is processed.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.claims import Claim, ModelIdentity
from promptq.shared.protocol.events import TokenEvent
from promptq.shared.protocol.output_format import Output, ToolCallOutput
from promptq.shared.protocol.output_style import OutputStyle
from promptq.shared.protocol.pictures import check_found
from promptq.shared.protocol.request import MAX_PROMPT_LOGPROBS, Embed, Pooling, Request
from promptq.shared.protocol.rows import Row
from promptq.worker.engine.api.grammar import Grammar, GrammarError
from promptq.worker.engine.api.messages import EngineRequest
from promptq.worker.engine.api.port import Capacity
from promptq.worker.leases.rows import PreparedRequest
from promptq.worker.text.grammars.schema_masks import Grammars, TakesLongError
from promptq.worker.text.output_marks import OutputMarks
from promptq.worker.text.tokenizer import Tokenizer

_QUICK_BYTES = 32 * 1024
_QUICK_MESSAGES = 128
_QUICK_TOKENS = 1024  # of earlier attempts or a prefix, outside the slow lane

_MAX_VALUES = 100_000
"""The most JSON values in a payload, besides token ids of the prompt. The parser creates an object
for each value, and no other thread runs meanwhile."""

_CHANGES_LOGITS = (
    *("bad_words", "frequency_penalty", "logit_bias", "min_p", "min_tokens", "presence_penalty"),
    *("repetition_penalty", "top_p"),
)
"""Fields that change the odds of tokens. Log-probabilities do not show these changes."""

_SEPARATORS = (b",", b"[", b"{")  # one before each element of an array and each member of an object

_sequence_ids = itertools.count(1)


class UnservedFieldError(InvalidRequestError):
    """Raised if this worker's engine cannot serve a field of the request, but the engine of another
    worker may. `ability` is the field's name in `EngineAbilities.refused`."""

    def __init__(self, field: str, ability: str | None = None) -> None:
        what = ability if field in ("messages", "embed") and ability else "it"
        super().__init__(
            f"{field}: no live worker's engine serves {what}", field, error_type="unsupported"
        )
        self.ability = ability or field


@dataclass(frozen=True, slots=True)
class Preparation:
    """Turns claims into prepared requests. `prepare` may run in any thread."""

    tokenizer: Tokenizer
    engine: Capacity
    model: ModelIdentity
    end_token_ids: frozenset[int]
    grammars: Grammars | None = None
    pooling: Pooling | None = "last"
    """Embedding requests' default pooling. None: each request must name its pooling."""

    def prepare(self, claim: Claim, *, only_quick: bool = False) -> PreparedRequest:
        """Parse, check and tokenise a request, and restore the state that earlier attempts reached.

        Raises InvalidRequestError, which names the wrong field. With `only_quick`, raises
        TakesLongError before any work that may take long.
        """
        if claim.is_spoilt:
            raise _invalid("tokens", "an entry of the log is not an event")
        if only_quick and (len(claim.payload) > _QUICK_BYTES or claim.num_logged > _QUICK_TOKENS):
            raise TakesLongError
        self._check_values(claim.payload)
        request = Request.parse(claim.payload)
        pair = _pair_of(request)
        self._check_served(request, pair)
        try:
            check_found(request.pictures if request.messages else ())
        except ValueError as error:
            raise InvalidRequestError(str(error), "messages") from None
        if only_quick and len(request.messages or ()) > _QUICK_MESSAGES:
            raise TakesLongError
        prompt = self.tokenizer.encode_prompt(request)
        room = self.engine.limits.max_model_len - len(prompt)
        pictures, picture_tokens = request.pictures if request.messages else (), 0
        if pictures and claim.prompt_tokens is not None:
            picture_tokens = claim.prompt_tokens - len(prompt)
            room -= picture_tokens
        elif pictures:
            picture_tokens = min(sum(picture.num_tokens - 1 for picture in pictures), room)
        self._check_tokens(request, prompt)
        stop_tokens = self._stop_tokens(request)
        ends = frozenset([*stop_tokens, *(request.stop_token_ids or ())])
        if not request.ignore_eos:
            ends |= self.end_token_ids
        prefix = self._prefix(request, ends, len(prompt))
        if only_quick and len(prefix) > _QUICK_TOKENS:
            raise TakesLongError
        emitted = prefix  # published already if there are events
        if claim.events:
            emitted = [token_id for event in claim.events for token_id in event.token_ids]
        is_inexact = bool(claim.events) and (
            claim.is_foreign or not self.engine.abilities.resumes_exactly(request, emitted)
        )
        if is_inexact and request.resume == "exact_only":
            raise self._cannot_resume(request, emitted)
        if not claim.events:
            self._check_counted(request, prefix)
        pooling = self._pooling(request.embed)
        if pooling is not None:
            max_tokens = 1
        else:
            max_tokens = min(len(prefix) + request.max_tokens, room) if request.max_tokens else room
        min_tokens = len(prefix) + request.min_tokens
        style = self.model.output_style or OutputStyle()
        marks = OutputMarks(self.tokenizer, style, request, prompt)
        if not claim.events:  # an earlier release, without this check, may have begun the request
            marks.check_stop_strings()
        text, begun = marks.text_stream(prefix, claim.events, min_tokens)
        unsent = []
        if prefix and not claim.events:  # otherwise the prefix is already published
            unsent = [TokenEvent(index=0, token_ids=prefix, text=begun, attempt=claim.attempt)]
        events = [*unsent, *claim.events]
        return PreparedRequest(
            claim=claim,
            engine_request=EngineRequest(
                sequence_id=next(_sequence_ids),
                prompt_token_ids=prompt,
                params=request.model_copy(update={"min_tokens": min_tokens}) if prefix else request,
                seed=claim.seed if request.seed is None else request.seed,
                max_tokens=max_tokens,
                end_token_ids=ends,
                bad_token_sequences=self._bad_token_sequences(request, max_tokens),
                output_token_ids=[*emitted],
                priority=request.priority,
                order=claim.order,
                cache_salt=request.cache_salt or "",
                tenant=claim.tenant,
                weight=claim.weight,
                grammar=self._grammar(request, ends, emitted, bool(unsent), only_quick),
                pooling=pooling,
                pair=pair,
                pictures=tuple(picture.url for picture in pictures),
                picture_tokens=picture_tokens,
            ),
            text=text,
            token_ids=list(emitted),
            texts=[event.text for event in events],
            logprobs=[item for event in events for item in event.logprobs or ()],
            prompt_json=claim.events[0].prompt_json if claim.events else "",
            request=request,
            stop_tokens=stop_tokens,
            reasoning=marks.reasoning_tokens(ends),
            resumed_inexactly=is_inexact,
            rows=(rows := [Row.of(claim.request_id, claim.fence, event) for event in unsent]),
            unsent=list(rows),
        )

    def _stop_tokens(self, request: Request) -> dict[int, str]:
        """Returns the stop strings that are exactly one added token, by token id. If such a token
        is special, the output's text does not show it."""
        return {
            token_id: stop
            for stop in request.stop_strings
            if (token_id := self.tokenizer.added_token(stop)) is not None
            and token_id < self.engine.limits.vocab_size
        }

    def _prefix(self, request: Request, ends: frozenset[int], num_prompt: int) -> list[int]:
        """Returns the tokens of the request's output prefix. Leaves out an end token at the end of
        the prefix's `token_ids`, because the output continues there."""
        if (wanted := request.output_prefix) is None:
            return []
        prefix = [*wanted.token_ids]
        if ends.intersection(prefix[-1:]):
            prefix.pop()
        if wanted.text:
            prefix += self.tokenizer.encode_output(wanted.text)
        longest_context = self.engine.limits.max_model_len
        longest = longest_context - 1 - num_prompt
        if len(prefix) > longest:
            raise _invalid(
                "output_prefix",
                f"this model's maximum context length is {longest_context} tokens,"
                f" and after the prompt's {num_prompt} the prefix may have {longest} at most; it"
                f" has {len(prefix)}",
                code="context_length_exceeded",
            )
        return prefix

    def _check_values(self, payload: bytes) -> None:
        # Counts values before the payload is parsed.
        most = _MAX_VALUES + self.engine.limits.max_model_len
        if len(payload) > most and sum(map(payload.count, _SEPARATORS)) > most < _num_values(
            payload
        ):
            raise _invalid(
                "payload", f"holds more than {most} JSON values, the most that this worker takes"
            )

    def _check_served(self, request: Request, pair: tuple[str, str] | None) -> None:
        if request.model is not None and self.model.name and request.model != self.model.name:
            raise _invalid("model", f"this queue serves {self.model.name!r}, not {request.model!r}")
        abilities = self.engine.abilities
        unheeded = abilities.unheeded
        if not abilities.logprobs:
            unheeded |= {"logprobs"}
        if pair and not abilities.scores:
            raise UnservedFieldError("embed", "scores")
        for name in sorted((unheeded - {"embed"} if pair else unheeded) & request.model_fields_set):
            if getattr(request, name) != Request.model_fields[name].default:
                raise UnservedFieldError(name)
        if request.messages and request.pictures and not abilities.pictures:
            raise UnservedFieldError("messages", "pictures")
        if not (abilities.generates or request.embed or request.tokenize):
            raise _unsupported("embed", "computes only vectors, so a request must have this field")
        lowest = abilities.lowest_temperature
        if 0.0 < request.temperature < lowest:
            # The engine can correct its draws by log-probabilities, which know no such field.
            others = [] if abilities.logprobs else ["this engine"]
            others += filter(request.is_set, _CHANGES_LOGITS)
            others += [request.wanted_output.field] if request.wanted_output else []
            if others:
                why = f"takes 0, or {lowest} and more, with {others[0]}"
                raise _unsupported("temperature", why)

    def _check_counted(self, request: Request, prefix: list[int]) -> None:
        """Raise InvalidRequestError if a server needs several calls for the request, and penalties
        would not count the tokens of all these calls."""
        if not (prefix or request.bad_words or request.wanted_output is not None):
            return
        uncounted = {*self.engine.abilities.inexact_fields(request, prefix)} - {"temperature"}
        if uncounted:
            other = "output_prefix" if prefix else request.field_that_bounds
            why = f"would not count the tokens of all its calls, as it must with {other}"
            raise _unsupported(min(uncounted), why)

    def _pooling(self, embed: Embed | None) -> Pooling | None:
        if embed is None:
            return None
        if embed.query is not None:
            return "last"  # the server knows better
        abilities, size = self.engine.abilities, self.engine.limits.embedding_size
        if embed.dimensions is not None and embed.dimensions > size:
            raise _invalid(
                "embed",
                f"dimensions: {embed.dimensions} is more than the {size} that the vectors of this"
                " model have",
            )
        if abilities.normalizes and not embed.normalize:
            raise _unsupported("embed", "computes only vectors of length 1 (`normalize`)")
        if not abilities.generates:
            if embed.pooling not in (None, self.pooling):
                raise _unsupported("embed", f"pools as its model does, not by {embed.pooling!r}")
            return self.pooling or "last"  # the server knows better
        pooling = embed.pooling or self.pooling
        if pooling is None:
            raise _invalid(
                "embed",
                "pooling: the model's files name a pooling that this worker does not support;"
                " choose `last` or `mean`",
            )
        return pooling

    def _cannot_resume(self, request: Request, emitted: list[int]) -> InvalidRequestError:
        fields = self.engine.abilities.inexact_fields(request, emitted)
        why = "with it," if fields else "in its number format,"
        return _invalid(
            fields[0] if fields else "resume",
            f"{why} this worker's engine cannot continue an interrupted stream exactly, and the"
            " request requires `exact_only`",
            error_type="cannot_resume",
        )

    def _check_tokens(self, request: Request, prompt: list[int]) -> None:
        field_name = "prompt" if request.messages is None else "messages"
        if not prompt:
            why = "holds no tokens"
            if request.prompt == "":
                why = "is empty, and this model's tokenizer puts no token in front of a text"
            raise _invalid(field_name, f"{why}, so there is nothing to continue")
        limits = self.engine.limits
        longest = limits.max_model_len - 1
        if len(prompt) > longest:
            raise _invalid(
                field_name,
                "the prompt is too long: this model's maximum context length is"
                f" {limits.max_model_len} tokens, of which at most {longest} can be the"
                f" prompt; this one has {len(prompt)}",
                code="context_length_exceeded",
            )
        if request.prompt_logprobs is not None:
            num_logprobs = len(prompt) * (request.prompt_logprobs + 1)
            if num_logprobs > MAX_PROMPT_LOGPROBS:
                raise _invalid(
                    "prompt_logprobs",
                    f"{request.prompt_logprobs} likeliest tokens and the prompt's token at each of"
                    f" {len(prompt)} positions are {num_logprobs} log-probabilities, more than the"
                    f" {MAX_PROMPT_LOGPROBS} that a request may have; request fewer, or send a"
                    " shorter prompt",
                )
        named: list[tuple[str, list[int]]] = [(field_name, prompt)]
        if request.stop_token_ids:
            named.append(("stop_token_ids", request.stop_token_ids))
        if request.output_prefix is not None and request.output_prefix.token_ids:
            named.append(("output_prefix", request.output_prefix.token_ids))
        if request.logit_bias:
            named.append(("logit_bias", [int(key) for key in request.logit_bias]))
        for name, token_ids in named:
            worst = max(token_ids)
            if worst >= limits.vocab_size:
                why = f"is outside the vocabulary of {limits.vocab_size} tokens"
                raise _invalid(name, f"token id {worst} {why}")

    def _grammar(
        self,
        request: Request,
        ends: frozenset[int],
        emitted: list[int],
        is_prefix: bool,
        only_quick: bool,
    ) -> Grammar | None:
        """Returns the grammar's state after `emitted`. `is_prefix` is True if `emitted` is the
        output prefix."""
        wanted, grammars = request.wanted_output, self.grammars
        if wanted is None:
            return None
        if grammars is None or not self.engine.abilities.grammars:
            raise UnservedFieldError(wanted.field, "response_format")

        def after_emitted(output: Output) -> Grammar:
            grammar = grammars.start(output, ends, only_known=only_quick)
            for token_id in emitted:
                grammar.accept(token_id)
            return grammar

        try:
            return after_emitted(wanted)
        except GrammarError as error:
            if is_prefix:
                why = f"does not fit {wanted.field}: {error}"
                raise _invalid("output_prefix", why) from error
            if isinstance(wanted, ToolCallOutput):
                with suppress(GrammarError):
                    return after_emitted(replace(wanted, is_begun=True))
            why = f"the output of earlier attempts does not fit: {error}"
            raise _invalid(wanted.field, why, error_type="internal_error") from error

    def _bad_token_sequences(
        self, request: Request, max_tokens: int
    ) -> tuple[tuple[int, ...], ...]:
        # Leaves out sequences that are longer than the output can be.
        spellings = map(tuple, self.tokenizer.encode_words(request.bad_words or ()))
        return tuple(sorted({tokens for tokens in spellings if len(tokens) <= max_tokens}))


def _invalid(field: str, why: str, **more: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {why}", field, **more)


def _unsupported(field: str, why: str) -> InvalidRequestError:
    return _invalid(field, f"this worker's engine {why}", error_type="unsupported")


def _pair_of(request: Request) -> tuple[str, str] | None:
    query, prompt = request.embed and request.embed.query, request.prompt
    return (query, prompt) if query and isinstance(prompt, str) else None


def _num_values(payload: bytes) -> int:
    # An upper bound: the number of separators outside of strings.
    text = payload.replace(b"\\\\", b"").replace(b'\\"', b"")  # so each `"` begins or ends a string
    characters = np.frombuffer(text, dtype=np.uint8)
    is_outside = np.cumsum(characters == ord('"'), dtype=np.uint8) & 1 == 0
    return int(np.count_nonzero(np.isin(characters, list(b"".join(_SEPARATORS))) & is_outside))
