"""Settings of workers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SecretStr

from promptq.shared.settings.common import ReaperSettings, flag_of, read_settings_of


class WorkerSettings(ReaperSettings):
    """Settings of a worker. Each setting is also an option of `promptq worker`."""

    engine: Literal["native", "vllm", "llama.cpp", "sglang", "openai", "openai-remote"] = Field(
        "native",
        description="native: this process runs the model; otherwise the kind of inference server"
        " that runs it, at --upstream or started by --engine-command (extra `upstream`)",
    )
    upstream: str | None = Field(
        None,
        description="URL of a running inference server, such as http://localhost:8000; its"
        " redirects are not followed; default: the worker starts and stops a server",
    )
    upstream_key: SecretStr | None = Field(
        None,
        description="API key of that server; safer in the environment, as PROMPTQ_UPSTREAM_KEY",
    )
    overflow: bool = Field(
        False,
        description="claim only requests that the queue's other workers would finish after their"
        " deadline, if the queue allows this (docs/engines.md, Overflow)",
    )
    upstream_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="part of the server's KV cache for this worker, if several workers share the"
        " server",
    )
    engine_command: str | None = Field(
        None,
        description="program that starts the server, such as /opt/vllm/bin/vllm; default:"
        " `vllm`, `sglang` or `llama-server` on the path. It gets the arguments after `--`",
    )
    engine_arguments: tuple[str, ...] = Field(
        (), description="further arguments of that program: a JSON list in PROMPTQ_ENGINE_ARGUMENTS"
    )
    model: str | None = Field(
        None,
        description="local directory, GGUF file, or hub name; default: the shipped model;"
        " `model-free` serves letters without any model, to try or to load-test a queue",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="name of the model for clients; default: the hub name, or the name of the"
        " directory or file",
    )
    trust_remote_code: bool = Field(
        False, description="run Python code from the model's files; read that code first"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto: cuda if there is a GPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number format; auto: as the model was saved, but bfloat16 instead of float16"
        " for quantized weights on a CPU; with an inference server, float32 states that the server"
        " computes in fp32, KV cache included",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="round the weights when the model is loaded: int8, or int4 with a scale for"
        " each group; weights that the files have in 8 or 4 bits stay as they are",
    )
    quantization_group: Literal["32", "128"] = Field(
        "32", description="how many weights in int4 share a scale; 128 takes 8% less memory"
    )
    quantize_embeddings: bool = Field(
        True,
        description="with --quantization, also round the embedding and the output layer, to int8",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="int8 on a CPU, fp8 on a GPU: the KV cache holds about twice the tokens in the"
        " same memory; auto: as the model computes",
    )
    attention: str = Field(
        "auto",
        description="name of the attention backend; auto: native code if it serves the model,"
        " otherwise the fastest backend that is available",
    )
    native: bool = Field(
        True,
        description="compute a model by promptq's code if that code supports all parts of the"
        " model: native code on a CPU, fused kernels on a GPU",
    )
    compile: bool = Field(
        False,
        description="if promptq's code does not serve the model, run its layers by torch.compile:"
        " steps are faster, the start takes longer",
    )
    cuda_graphs: bool = Field(
        True, description="on a GPU, run steps as CUDA graphs; off: to debug or save memory"
    )
    max_num_seqs: int = Field(
        64, ge=1, description="most sequences in the batch (slots), or on the inference server"
    )
    max_num_batched_tokens: int = Field(2048, ge=1, description="token budget of a step")
    prefill_chunk: int | None = Field(
        None, ge=1, description="most prompt tokens of one sequence in a step; default: the budget"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt and output; default: the model's, if it fits"
    )
    kv_cache_memory: str | None = Field(
        None,
        description="size of the KV cache with recurrent states, such as 512M or 4G; default:"
        " depends on free memory",
    )
    speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=64,
        description="most tokens of one sequence that a step guesses from the sequence's text and"
        " checks (drafts), if that pays; default: 7 on a CPU if no token's logits depend on the"
        " rest of the step, otherwise 0",
    )
    async_scheduling: bool | None = Field(
        None,
        description="launch a step before the last step's tokens are collected; default:"
        " only on CUDA, where the device would otherwise wait for the host",
    )
    share_prefix_cache: bool = Field(
        False,
        description="let tenants share cached prefixes of prompts; off: each tenant has its own, so"
        " no tenant can learn from the cache what another has sent",
    )
    pooling: Literal["last", "mean"] | None = Field(
        None,
        description="how a prompt becomes a vector, unless a request sets it: the last token's"
        " hidden state, or the mean of all; default: as in the model's 1_Pooling/config.json,"
        " otherwise last",
    )
    output_style: str = Field(
        "auto",
        description="how the model writes tool calls: a family such as gpt-oss, glm-4.7, gemma-4 or"
        " pythonic; auto: as its chat template shows",
    )
    seed: int | None = Field(
        None,
        description="each request without a seed gets a fixed one, made of this number and"
        " the request's id",
    )
    prefetch_depth: int | None = Field(
        None, ge=0, description="requests prepared beyond free slots; default: about 100 ms of work"
    )
    max_events_per_second: float | None = Field(
        None,
        gt=0,
        description="above this rate, tokens of one stream are sent together, up to 100 ms late;"
        " first tokens, ends and streams with stop strings are never delayed; inf: each token is"
        " sent by itself; default: 500 for each core",
    )
    stuck_seconds: float = Field(
        120.0,
        gt=0,
        description="seconds that one step may take; after that, the engine counts as hung, and the"
        " worker returns its requests to the queue and exits; with an inference server: seconds"
        " that a stream may bring no token",
    )
    drain_seconds: float = Field(
        20.0, ge=0, description="seconds for which a stopping worker continues its running requests"
    )
    swap_least_seconds: float = Field(
        15.0,
        ge=0,
        description="with several models: minimum seconds that a model with work stays loaded",
    )
    swap_longest_wait: float = Field(
        60.0,
        gt=0,
        description="with several models: maximum seconds that a request waits for its model while"
        " another model has work",
    )
    swap_idle_seconds: float = Field(
        300.0,
        gt=0,
        description="with several models: seconds after which a model without work is unloaded;"
        " inf: it stays until another model is needed",
    )
    swap_overlap: bool = Field(
        True,
        description="with several models: load the next one while the last one still runs, if there"
        " is memory for both; on a GPU this needs --kv-cache-memory",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the worker's metrics for Prometheus; 0: a free one; default: none",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="address at which the metrics are served; 0.0.0.0: all"
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the worker's probes /startupz, /livez and /readyz; 0: a free one;"
        " default: none",
    )
    health_host: str = Field(
        "127.0.0.1", description="address at which the probes are served; 0.0.0.0: all"
    )


def read_worker_settings(**overrides: Any) -> WorkerSettings:
    """Returns a worker's settings; `overrides` have priority. Raises ConfigurationError."""
    return read_settings_of(WorkerSettings, flag_of, **overrides)
