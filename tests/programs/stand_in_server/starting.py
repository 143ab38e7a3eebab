"""Starts the stand-in, reads its state and makes it fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import gguf
import httpx2
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from promptq.shared.protocol.claims import ModelIdentity
from promptq.worker.engine.api.messages import EngineLimits
from promptq.worker.serve.build import Served
from promptq.worker.text.tokenizer import ByteTokenizer
from promptq.worker.upstream.dialects.dialect import Dialect, ServerDescription
from promptq.worker.upstream.dialects.vllm import VllmDialect
from promptq.worker.upstream.forwarding_engine import ForwardingEngine
from tests.programs.stand_in_server.batch import VOCAB_SIZE, continuation
from tests.support.processes import running
from tests.support.servers import free_port
from tests.support.waiting import until

END = "<end>"


def save_byte_model(directory: Path) -> Path:
    """Saves a configuration, and a tokenizer with a chat template, without weights. The end token
    is 256. Returns the directory."""
    vocabulary = {character: byte for byte, character in _characters().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    whole.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    whole.save_pretrained(directory)
    config = {"model_type": "llama", "vocab_size": 257, "eos_token_id": 256, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_byte_gguf(file: Path) -> Path:
    """Saves the byte tokenizer in a GGUF file. The format needs at least one merge, so the file has
    a merge of two bytes that no text has. Returns the file."""
    characters = _characters()
    tokens = [*(characters[byte] for byte in range(256)), END, characters[255] * 2]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges([f"{characters[255]} {characters[255]}"])
    writer.add_eos_token_id(256)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _characters() -> dict[int, str]:
    """Returns the character of each byte: itself if it is printable, else one after 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        byte: chr(byte) if byte in printable else chr(256 + others.index(byte))
        for byte in range(256)
    }


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


DESCRIPTION = ServerDescription("stand-in", "m", 64)
"""Describes a server in which no probe has found an ability."""


def served_upstream(
    url: str,
    dialect: Dialect | None = None,
    *,
    limits: EngineLimits | None = None,
    idle_seconds: float = 60.0,
) -> Served:
    """Returns the parts of a worker that forwards to the stand-in at `url`. Without a `dialect`,
    the stand-in counts as a vLLM that computes in fp32."""
    dialect = dialect or VllmDialect(is_exact=True)
    engine = ForwardingEngine(url, None, dialect, limits or limits_of(), DESCRIPTION, idle_seconds)
    identity = ModelIdentity("m", "vllm-m")
    ends = frozenset({END_TOKEN_ID})
    return Served(engine, ByteTokenizer(), identity, ends, url, "float32")


def text_after(prompt: str, num_tokens: int) -> str:
    """Returns the text that answers a greedy request."""
    return bytes(continuation(prompt.encode(), num_tokens)).decode()


@dataclass(frozen=True, slots=True)
class StandIn:
    """A running stand-in. `pid` is its process id."""

    url: str
    pid: int

    def told(self) -> dict[str, Any]:
        """Returns the numbers of running and waiting requests, and of all requests by how they
        ended."""
        answer: dict[str, Any] = httpx2.get(f"{self.url}/stand-in").json()
        return answer

    def fail(self, fault: str) -> None:
        """Begin a fault (see `FAULTS`). An empty text ends the current fault."""
        httpx2.post(f"{self.url}/stand-in", json={"fault": fault}).raise_for_status()


@contextmanager
def stand_in_server(dialect: str, *options: str, port: int | None = None) -> Iterator[StandIn]:
    """Run a stand-in until the end of the context. `dialect` is the kind of server."""
    port = port or free_port()
    command = (sys.executable, "-m", "tests.programs.stand_in_server", dialect, "--port", str(port))
    with TemporaryFile("w+") as said, running(*command, *options, stderr=said) as process:
        stand_in = StandIn(f"http://127.0.0.1:{port}", process.pid)

        def answers() -> bool:
            if process.poll() is not None:
                said.seek(0)
                raise AssertionError(f"it ended with {process.returncode}: {said.read()}")
            try:
                return stand_in.told() is not None
            except httpx2.HTTPStatusError:
                return True  # it wants a key
            except httpx2.HTTPError:
                return False

        until(answers)
        yield stand_in
