"""Lets vLLM continue a grammar inside of an output. Tried with vLLM 0.32.

vLLM begins each grammar at its beginning, so it could not mask an output that another call has
begun. The field NUM_EMITTED in a call's `extra_args` is the number of tokens at the end of the
prompt that belong to the output. This plugin moves the new grammar past these tokens, whichever
library has compiled the grammar. If a token does not fit the grammar, only its request fails.

This module runs in vLLM's environment, and imports nothing of promptq.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

NUM_EMITTED = "promptq_num_emitted"


def register() -> None:
    """Change vLLM's `StructuredOutputManager`, or log a warning if this vLLM is not supported. Each
    process of vLLM calls this function (entry point `vllm.general_plugins`)."""
    try:
        from vllm.v1.structured_output import (  # type: ignore[import-not-found]
            StructuredOutputManager as Manager,
        )

        create = Manager._create_grammar
    except (AttributeError, ImportError) as error:  # vLLM must start all the same
        logging.getLogger("vllm.promptq").warning("this vLLM is not supported: %s", error)
        return
    if hasattr(create, NUM_EMITTED):
        return  # another copy of this module was here first

    @functools.wraps(create)
    def create_and_resume(manager: Any, request: Any, *args: Any, **options: Any) -> Any:
        grammar = create(manager, request, *args, **options)
        params = request.sampling_params
        num_emitted = ((params and params.extra_args) or {}).get(NUM_EMITTED, 0)
        if num_emitted:
            emitted = request.prompt_token_ids[-num_emitted:]
            if not grammar.accept_tokens(request.request_id, emitted):
                raise ValueError(f"{NUM_EMITTED}: the grammar does not match these tokens")
        return grammar

    setattr(create_and_resume, NUM_EMITTED, True)
    Manager._create_grammar = create_and_resume
