"""The programs: the place of each script, and the versions that it runs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Program:
    """One program. All its scripts use one interpreter. Without `pins`, the machine must have the
    program already."""

    name: str
    scripts: tuple[str, ...]
    pins: tuple[str, ...]
    about: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons of failed attempts for the page, by the ending of the attempt's name."""

    @property
    def is_node(self) -> bool:
        return self.scripts[0].endswith(".mjs")

    @property
    def version(self) -> str:
        """The program with its version, as docs/compatibility.md shows it."""
        separator = "@" if self.is_node else "=="
        return ", ".join(" ".join(pin.rsplit(separator, 1)) for pin in self.pins)


_OPENAI = ("calls", "tools", "responses")

PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "openai",
            tuple(f"clients/openai_{it}.py" for it in _OPENAI),
            ("openai==3.57.0",),
            "Python",
        ),
        Program(
            "openai-node",
            ("clients/openai_node.mjs",),
            ("openai@7.57.0", "zod@4.6.7"),
            "Node",
        ),
        Program(
            "anthropic",
            ("clients/anthropic_python.py",),
            ("anthropic==2.14.0",),
            "Python",
        ),
        Program(
            "anthropic-node",
            ("clients/anthropic_node.mjs",),
            ("@anthropic-ai/sdk@1.14.0", "zod@4.6.7"),
            "Node",
        ),
        Program("curl", ("clients/curl_command.py",), ()),
        Program(
            "litellm",
            ("frameworks/litellm_calls.py",),
            ("litellm==1.110.2",),
        ),
        Program("langchain", ("frameworks/langchain_chat.py",), ("langchain-openai==1.7.4",)),
        Program(
            "pydantic-ai",
            ("frameworks/pydantic_ai_agent.py",),
            ("pydantic-ai-slim[openai]==2.68.0",),
        ),
        Program("instructor", ("frameworks/instructor_modes.py",), ("instructor==1.17.0",)),
        Program(
            "ai-sdk",
            ("frameworks/ai_sdk.mjs",),
            (
                "ai@7.0.173",
                "@ai-sdk/openai-compatible@3.0.92",
                "@ai-sdk/openai@4.0.118",
                "zod@4.6.7",
            ),
            "Vercel's AI SDK",
        ),
        Program("aisuite", ("frameworks/aisuite_client.py",), ("aisuite[openai,mcp]==0.2.0",)),
        Program(
            "llama-index",
            ("frameworks/llama_index_like.py",),
            ("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
        ),
        Program("dspy", ("frameworks/dspy_modules.py",), ("dspy[numpy]==3.4.1",)),
        Program("haystack", ("frameworks/haystack_components.py",), ("haystack-ai==3.4.1",)),
        Program("mirascope", ("frameworks/mirascope_calls.py",), ("mirascope[openai]==2.8.2",)),
        Program("outlines", ("frameworks/outlines_types.py",), ("outlines[openai]==1.3.3",)),
        Program(
            "guidance", ("frameworks/guidance_vllm.py",), ("guidance==0.3.1", "openai==3.57.0")
        ),
        Program("magentic", ("frameworks/magentic_prompts.py",), ("magentic==0.41.1",)),
        Program(
            "semantic-kernel", ("agents/semantic_kernel_agent.py",), ("semantic-kernel==1.45.0",)
        ),
        Program(
            "autogen",
            ("agents/autogen_agents.py",),
            ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        ),
        Program("agno", ("agents/agno_agent.py",), ("agno==3.1.10", "openai==3.57.0")),
        Program("strands", ("agents/strands_agent.py",), ("strands-agents[openai]==1.62.0",)),
        Program("smolagents", ("agents/smolagents_server.py",), ("smolagents[openai]==1.26.0",)),
        Program("openai-agents", ("agents/openai_agents_sdk.py",), ("openai-agents==0.24.0",)),
        Program("llm", ("tools/llm_command.py",), ("llm==0.36",), "Simon Willison's command"),
        Program(
            "rq-dashboard",
            ("tools/rq_dashboard_pages.py",),
            ("rq-dashboard==0.9.0", "six==1.17.0"),
            "needs the Python package six, which it does not declare",
        ),
        Program(
            "llm-comply",
            ("measuring/llm_comply_formats.py",),
            ("llm-comply==0.5.0",),
            "conformance tests",
            {
                "Image Input": "images are not served",
                "Error Handling": "the tests expect an error for a call without `model`, but"
                " the gateway's own queue serves the call",
            },
        ),
        Program(
            "inspect-ai",
            ("measuring/inspect_ai_tasks.py",),
            ("inspect-ai==0.3.285", "openai==3.57.0"),
        ),
        Program("aiperf", ("measuring/aiperf_profile.py",), ("aiperf==0.13.0",)),
        Program("guidellm", ("measuring/guidellm_benchmark.py",), ("guidellm==0.8.1",)),
        Program(
            "lm-eval",
            ("measuring/lm_eval_tasks.py",),
            ("lm-eval[api]==0.4.13", "transformers==5.23.0"),
        ),
    )
}
