"""lm-eval: generation over chats and completions, and log-likelihoods of given answers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lm_eval
import trying
from lm_eval.tasks import TaskManager
from trying import attempt, same

home = Path(os.environ["HOME"])
data = home / "data.jsonl"
data.write_text(
    "".join(
        json.dumps({"text": text, "choices": [" fox", " qxz"], "right": 0}) + "\n"
        for text in ("Once upon a time, there was a", "In the forest lived a small")
    )
)
COMMON = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
TASKS = {
    "generated": "output_type: generate_until\n"
    "generation_kwargs: {max_gen_toks: 12, temperature: 0, until: ['\\n\\n']}\n"
    "doc_to_target: ' fox'\n"
    "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n",
    "chosen": "output_type: multiple_choice\n"
    "doc_to_choice: choices\n"
    "doc_to_target: right\n"
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
}
for name, text in TASKS.items():
    (home / f"{name}.yaml").write_text(f"task: {name}\n{COMMON}{text}")


def evaluate(model: str, task: str, **fields: Any) -> Any:
    path = "chat/completions" if "chat" in model else "completions"
    manager = TaskManager(include_path=str(home), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model,
        model_args={
            "model": trying.MODEL,
            "base_url": f"{trying.URL}/{path}",
            "tokenizer": os.environ["COMPAT_MODEL_FOLDER"],
            "max_retries": 1,
            **fields,
        },
        tasks=[task],
        task_manager=manager,
        log_samples=True,
        apply_chat_template="chat" in model,
        bootstrap_iters=0,
    )


def answers(got: Any, task: str) -> list[Any]:
    return [sample["resps"] for sample in got["samples"][task]]


@attempt("generation over completions")
def _() -> str:
    got = answers(evaluate("local-completions", "generated"), "generated")
    body = {"prompt": "Once upon a time, there was a", "max_tokens": 12, "temperature": 0}
    wanted = trying.plain("/v1/completions", body)["choices"][0]["text"]
    same("text", got[0][0][0], wanted)
    return wanted


@attempt("generation over chats")
def _() -> str:
    got = answers(evaluate("local-chat-completions", "generated"), "generated")
    messages = [{"role": "user", "content": "Once upon a time, there was a"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    wanted = trying.plain("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    same("text", got[0][0][0], wanted)
    return wanted


@attempt("log-likelihoods of answers")
def _() -> str:
    got = evaluate("local-completions", "chosen")
    same("accuracy", got["results"]["chosen"]["acc,none"], 1.0)
    return str(answers(got, "chosen")[0])
