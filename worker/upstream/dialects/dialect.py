"""The protocol that each kind of inference server implements, and code that all kinds share."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from promptq.shared.protocol.events import TokenLogprob
from promptq.shared.protocol.request import FinishReason
from promptq.shared.settings.worker import WorkerSettings
from promptq.worker.engine.api.messages import EngineAbilities, EngineRequest, PromptLogprobs
from promptq.worker.text.tokenizer import HuggingFaceTokenizer
from promptq.worker.upstream.dialects.transport import RefusedError, Server

MOST_LISTED = 1024
"""The most entries of `allowed_token_ids` or `logit_bias`. More entries end vLLM's server on
a GPU."""
BANNED = -1e4
"""The bias of a token that a server may not choose."""
_LONGEST_NAME = 4096
"""The most characters of a model's name, which may be a path."""

_UNREPORTED = frozenset(
    {
        "accepted_tokens",
        "affinity_cached_tokens",
        "cached_tokens",
        "drafted_tokens",
        "kv_bytes_per_token",
        "kv_cached_blocks",
        "kv_shared_blocks",
        "peak_memory_bytes",
        "recomputed_tokens",
        "state_bytes",
        "step_ms",
    }
)
"""Statistics that no server reports separately for each worker."""


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """A server's report on itself, with results of probes. Unreported facts are None."""

    software: str
    """The server's name and version, for people: `vLLM 0.32.0`."""
    model: str
    """The server's name for the model."""
    max_model_len: int
    """The most tokens of a prompt and its output together."""
    max_num_seqs: int | None = None
    kv_tokens: int | None = None
    block_size: int = 1
    model_dir: str | None = None
    """Directory or hub name of the model's files, from the server's options."""
    gives_token_ids: bool = True
    """Whether the server takes and returns token ids. A server that takes text is not probed."""
    heeds_masks: bool = False
    """Whether a mask made the server choose another token in a probe."""
    takes_grammars: bool = False
    """Whether the server applied a call's grammar in a probe."""
    resumes_grammars: bool = False
    """Whether the server applied a grammar to the rest of a begun output in a probe."""
    reports_prompts: bool = False
    """Whether the server reported the log-probabilities of a prompt in a probe."""
    takes_pictures: bool = False
    """Whether the server turned a picture into tokens in a probe."""
    keeps_seeds: bool = False
    """Whether random numbers depended only on seed and position in a probe."""
    is_invariant: bool = False
    """Whether the server or VLLM_BATCH_INVARIANT states that logits do not depend on the batch, and
    a probe confirmed this."""
    embedding_size: int = 0
    """Length of vectors, if the server computes vectors and generates nothing; otherwise 0."""
    scores: bool = False
    """Whether the server scores documents for a query. Then it generates nothing."""

    @property
    def pools(self) -> bool:
        """Whether the server was started for pooling (vectors or scores)."""
        return self.scores or self.embedding_size > 0

    def __post_init__(self) -> None:
        """Checks the values. Raises ValueError for an unusable value."""
        for name, value in (("name", self.model), ("root", self.model_dir or "")):
            if not isinstance(value, str) or len(value) > _LONGEST_NAME:
                raise ValueError(
                    f"the model's {name} {value!r:.40} is no text of up to {_LONGEST_NAME}"
                    " characters"
                )
        for name in ("max_model_len", "max_num_seqs", "kv_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**53:
                raise ValueError(f"{name} is {value!r:.40}")


@dataclass(slots=True)
class Chunk:
    """The next tokens of a stream. `finish_reason` is set on the last chunk."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int | None = None
    """Number of prompt tokens, including those of pictures; None if it is not reported."""

    def cut(self, num_tokens: int) -> None:
        """Drop all tokens after the first `num_tokens`."""
        del self.token_ids[num_tokens:]
        if self.logprobs is not None:
            del self.logprobs[num_tokens:]


@dataclass(frozen=True, slots=True)
class Mask:
    """The tokens from which a server chooses one token."""

    allowed: npt.NDArray[np.bool_]  # [vocab_size]
    rejected: tuple[int, ...]
    """Tokens outside of the mask that the server has already chosen in this place. A call that
    cannot have the whole mask forbids at least these tokens."""
    may_be_grammar: bool = False
    """Whether the server takes `grammar`."""

    def is_grammar_beside(self, biases: Mapping[str, float] | None) -> bool:
        """Whether a call with these biases sends `grammar` instead of a list of tokens. This is so
        if the lists of allowed and of forbidden tokens are both too long."""
        num_allowed = int(np.count_nonzero(self.allowed))
        num_biased = len(self.allowed) - num_allowed + len(self.allowed_of(biases))
        return self.may_be_grammar and min(num_allowed, num_biased) > MOST_LISTED

    def allowed_of(self, biases: Mapping[str, float] | None) -> dict[str, float]:
        """Returns the entries of `biases` for allowed tokens."""
        return {name: by for name, by in (biases or {}).items() if self.allowed[int(name)]}

    @property
    def allowed_ids(self) -> list[int]:
        ids: list[int] = np.flatnonzero(self.allowed).tolist()
        return ids

    @property
    def forbidden_ids(self) -> list[int]:
        """The rejected tokens, then the other forbidden tokens by ascending id, because low ids are
        usually frequent tokens."""
        ids: list[int] = np.flatnonzero(~self.allowed).tolist()
        return [*dict.fromkeys([*self.rejected, *ids])]

    @property
    def grammar(self) -> str:
        """A Lark text for llguidance. The grammar matches any one of the allowed tokens."""
        ids = np.flatnonzero(self.allowed)
        ends = np.flatnonzero(np.diff(ids, append=-1) != 1)
        firsts, lasts = ids[np.r_[0, ends[:-1] + 1]].tolist(), ids[ends].tolist()
        ranges = ",".join(
            f"{first}-{last}" if first < last else f"{first}"
            for first, last in zip(firsts, lasts, strict=True)
        )
        return f"%llguidance {{}}\nstart: <[{ranges}]>"


@dataclass(frozen=True, slots=True)
class Continuation:
    """A call that continues the output of a request.

    With a mask, the server chooses one token. If the mask is large, the token may be outside of the
    mask. With a `grammar` (see `Grammar.source`), a server that takes grammars masks each token. If
    the server can apply a grammar to the rest of an output, `emitted` is the part before that rest.
    """

    request: EngineRequest
    """The request. Its seed is the seed of this call."""
    emitted: Sequence[int]
    """The output so far."""
    model: str
    mask: Mask | None = None
    grammar: str | None = None

    @property
    def prompt(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.emitted]

    @property
    def num_left(self) -> int:
        """The most tokens that the server may generate."""
        return self.request.max_tokens - len(self.emitted) if self.mask is None else 1


class Dialect(Protocol):
    """Translates requests and answers for one kind of server, with token ids in both directions.

    All coroutines and generators raise the errors of `Server`.
    """

    abilities: EngineAbilities
    """The abilities of a server that heeds no masks."""
    raw_vectors: ClassVar[Mapping[str, Any]] = {}
    """Fields of a call that make the server return vectors without normalising them."""

    def start_command(self, settings: WorkerSettings, port: int) -> list[str]:
        """Returns the command of a server with these settings. Raises ConfigurationError."""

    async def describe(self, server: Server) -> ServerDescription:
        """Makes the server generate a token as a test, and returns the server's description. Raises
        ConfigurationError for an unusable server."""

    def use(self, tokenizer: HuggingFaceTokenizer) -> None:
        """Set the model's tokenizer. Call this before `generate`."""

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        """Returns a text's token ids without special tokens; None if the server cannot tokenise."""
        return None

    async def prompt_logprobs(
        self, server: Server, request: EngineRequest, model: str
    ) -> PromptLogprobs | None:
        """Returns log-probabilities of the prompt's tokens from the second token on; None if this
        kind of server does not report them."""
        return None

    async def embedding(
        self, server: Server, request: EngineRequest, model: str
    ) -> tuple[npt.NDArray[np.float32], int | None]:
        """Returns the prompt's vector [embedding_size], not normalised, and the number of prompt
        tokens (None if it is not reported). For a request with a `pair`, returns the pair's score
        [1] in place of the vector."""
        if request.pair is not None:
            return await score_of(server, request.pair, model, **self.salt(request))
        fields = {**self.raw_vectors, **self.salt(request)}
        return await vector_of(server, request.prompt_token_ids, model, **fields), None

    def salt(self, request: EngineRequest) -> dict[str, str]:
        """Returns the field of a call that separates the cached prefixes of tenants; empty if this
        kind of server has no such field."""
        return {}

    def generate(self, server: Server, wanted: Continuation) -> AsyncGenerator[Chunk]:
        """Yields the tokens after those emitted, until the server ends the sequence; with a mask,
        yields one token. Leaves no generated token out. Closing the generator closes the
        connection."""


def abilities_of(dialect: Dialect, description: ServerDescription) -> EngineAbilities:
    """Returns a server's abilities. If the server heeds masks, a WatchedStream adds abilities."""
    known = dialect.abilities
    if description.pools:
        served = {"embed"} if description.embedding_size else set()
        scores, unheeded = description.scores, known.unheeded - served
        return replace(known, generates=False, scores=scores, unheeded=unheeded)
    if description.is_invariant:
        known = replace(known, exact_resume=True)
    if description.keeps_seeds:
        known = replace(known, inexact_with=known.inexact_with - {"temperature"})
    if description.takes_pictures:
        known = replace(known, pictures=True)
    if description.reports_prompts:
        known = replace(known, unheeded=known.unheeded - {"prompt_logprobs"})
    if description.heeds_masks:
        known = replace(known, grammars=True, unheeded=known.unheeded - {"bad_words", "min_tokens"})
    return known


async def vector_of(
    server: Server, token_ids: Sequence[int], model: str, **more: Any
) -> npt.NDArray[np.float32]:
    """Returns the vector [embedding_size] of a prompt through OpenAI's `/v1/embeddings`. `more` has
    fields that are not in OpenAI's API. Raises the errors of `Server`."""
    body = {"model": model, "input": [[*token_ids]], "encoding_format": "base64", **more}
    (answer,) = (await server.post("/v1/embeddings", body, server.idle_seconds))["data"]
    return np.frombuffer(b64decode(answer["embedding"], validate=True), "<f4")


async def score_of(
    server: Server, pair: tuple[str, str], model: str, **more: Any
) -> tuple[npt.NDArray[np.float32], int | None]:
    """Returns the score [1] of a `pair` (query, document) through Jina's `/v1/rerank`, and the
    number of prompt tokens (None if it is not reported). Raises the errors of `Server`."""
    query, document = pair
    body = {"model": model, "query": query, "documents": [document], **more}
    answer = await server.post("/v1/rerank", body, server.idle_seconds)
    (result,) = answer["results"]
    score = np.array([result["relevance_score"]], np.float32)
    return score, (answer.get("usage") or {}).get("prompt_tokens")


async def with_pooling(
    server: Server, description: ServerDescription, *, may_do_both: bool = True
) -> ServerDescription:
    """Returns the description with `scores` and `embedding_size` of a server for pooling. Raises
    RefusedError if the server computes neither scores nor vectors. If `may_do_both` is False, this
    function requests no vector from a server that scores: the vector might be wrong."""
    with suppress(RefusedError):
        await score_of(server, ("a", "b"), description.model)
        description = replace(description, scores=True)
        if not may_do_both:
            return description
    try:
        size = len(await vector_of(server, [0], description.model))
    except RefusedError:
        if not description.scores:
            raise
        return description
    return replace(description, embedding_size=size)


def salt_of(request: EngineRequest, *, shares_prefixes: bool) -> dict[str, str]:
    """Returns the field `cache_salt`; empty without a salt. Calls share cached prefixes only if the
    calls' salts are equal."""
    tenant = "" if shares_prefixes else request.tenant
    is_salted = tenant or request.cache_salt
    return {"cache_salt": f"{tenant}:{request.cache_salt}"} if is_salted else {}


def server_abilities(*, unheeded: frozenset[str], **own: Any) -> EngineAbilities:
    """Returns the abilities of one kind of server. `unheeded` are request fields that this kind
    would ignore. `own` has the abilities that differ between kinds."""
    return EngineAbilities(
        grammars=False,
        preempts_inexact=False,
        is_at_risk=False,
        unreported=_UNREPORTED,
        unheeded=unheeded | {"embed", "prompt_logprobs"},
        **own,
    )
