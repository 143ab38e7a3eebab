"""Refuses settings that cannot work, and requests that no batch could hold."""

from __future__ import annotations

from promptq.shared.errors import ConfigurationError
from promptq.worker.engine.api.messages import EngineLimits, EngineRequest


def check_settings(limits: EngineLimits) -> None:
    """Raise ConfigurationError, which names a setting, if these limits allow no request."""
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ConfigurationError(
            f"--max-num-batched-tokens: {limits.max_num_batched_tokens} tokens are fewer than"
            f" --max-num-seqs, {limits.max_num_seqs}; in a step, each sequence may need one"
        )
    if limits.kv_tokens < 2:
        raise ConfigurationError(
            f"--kv-cache-memory: leaves room for {limits.kv_tokens} tokens in the KV cache, "
            "but a request needs a token of prompt and one of output"
        )


def check_request(request: EngineRequest, limits: EngineLimits) -> None:
    """Raise ValueError, which names the field, if the request exceeds these limits."""
    num_prompt_tokens = len(request.prompt_token_ids)
    num_output_tokens = len(request.output_token_ids)
    num_tokens = num_prompt_tokens + num_output_tokens
    if num_prompt_tokens == 0:
        raise ValueError("prompt_token_ids: is empty, and there is nothing to continue")
    if num_tokens >= limits.max_model_len:
        raise ValueError(
            f"prompt_token_ids: {num_prompt_tokens} tokens and {num_output_tokens} of output "
            f"leave no room for another: the model length is {limits.max_model_len}"
        )
    if request.max_tokens <= num_output_tokens:
        raise ValueError(
            f"max_tokens: {request.max_tokens} is reached already by the {num_output_tokens} "
            "tokens of output"
        )
    for name in ("prompt_token_ids", "output_token_ids"):
        token_ids = getattr(request, name)
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < limits.vocab_size:
                raise ValueError(
                    f"{name}: {token_id} is outside the vocabulary of {limits.vocab_size}"
                )
