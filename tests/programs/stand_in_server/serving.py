"""Workers that forward to the stand-in, and what they answer."""

from __future__ import annotations

from promptq.shared.protocol.claims import ModelIdentity
from promptq.worker.engine.api.messages import EngineLimits
from promptq.worker.serve.build import Served
from promptq.worker.text.tokenizer import ByteTokenizer
from promptq.worker.upstream.dialects.dialect import Dialect
from promptq.worker.upstream.dialects.vllm import VllmDialect
from promptq.worker.upstream.forwarding_engine import ForwardingEngine
from tests.programs.stand_in_server.batch import VOCAB_SIZE
from tests.programs.stand_in_server.model import continuation

END_TOKEN_ID = 256


def limits_of(max_num_seqs: int = 16, max_model_len: int = 1024) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_model_len,
        max_model_len=max_model_len,
        kv_tokens=max_num_seqs * max_model_len,
        block_size=16,
        bytes_per_token=0,
        vocab_size=VOCAB_SIZE,
    )


def served_upstream(
    url: str,
    dialect: Dialect | None = None,
    *,
    limits: EngineLimits | None = None,
    idle_seconds: float = 60.0,
) -> Served:
    """The stand-in at `url`, which is taken to compute in fp32 unless the dialect says less."""
    dialect = dialect or VllmDialect(is_exact=True)
    engine = ForwardingEngine(url, None, dialect, limits or limits_of(), "m", idle_seconds)
    identity = ModelIdentity("m", "vllm-m")
    ends = frozenset({END_TOKEN_ID})
    return Served(engine, ByteTokenizer(), identity, ends, url, "float32")


def text_after(prompt: str, num_tokens: int) -> str:
    """What a greedy request gets."""
    return bytes(continuation(prompt.encode(), num_tokens)).decode()
