"""Makes the shipped model: ``python -m training.train``.

Writes a corpus, trains the tokenizer and the model on it, and saves both. Equal seeds lead to equal
files on machines of one kind with equally many threads.
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from promptq.worker.shipped import MODEL_DIR
from training.corpus import Batch, batches, document
from training.model_card import model_card
from training.tokenizer import END_OF_TEXT, PAD, TURN_END, train_tokenizer

IGNORED = -100
THREADS = 2


@dataclass(frozen=True)
class Plan:
    """The size of the model, and the settings of its training."""

    steps: int = 2400
    batch_tokens: int = 2048
    max_row_tokens: int = 1024
    matrix_rate: float = 2e-2
    embedding_rate: float = 3e-3
    warmup_share: float = 0.05
    exercises_until: float = 0.7
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    vocab_size: int = 2048
    tokenizer_documents: int = 8000
    validation_batches: int = 8
    hidden_size: int = 192
    layers: int = 5
    heads: int = 6
    key_value_heads: int = 2
    head_dim: int = 32
    feed_forward_size: int = 512
    max_positions: int = 2048


def train(out: Path, seed: int = 0, plan: Plan | None = None) -> float:
    """Train as planned and save everything under ``out``.

    Returns the loss on documents that training did not see, in nats per token.
    """
    plan = plan or Plan()
    tokenizer = _tokenizer(seed, plan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(tokenizer, plan)

    def encode(texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in tokenizer(texts)["input_ids"]]

    pad = _token_id(tokenizer, PAD)
    # Validation draws from a separate stream, so that its size changes nothing in training.
    training_rng, validation_rng = random.Random(f"{seed} train"), random.Random(f"{seed} validate")
    training = batches(
        training_rng,
        encode,
        plan.batch_tokens,
        plan.max_row_tokens,
        partial(exercise_share, plan=plan),
    )
    validation = batches(validation_rng, encode, plan.batch_tokens, plan.max_row_tokens)
    _fit(model, training, pad, plan)
    loss = _validate(model, islice(validation, plan.validation_batches), pad)
    _save(out, model, tokenizer, model_card(seed, plan.steps, loss))
    return loss


def rate_factor(step: int, plan: Plan) -> float:
    """Returns the learning rates' factor: linear warm-up to 1, then half a cosine down to 0."""
    warmup = max(1, round(plan.steps * plan.warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, plan.steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * done))


def exercise_share(step: int, plan: Plan) -> float:
    """Returns the share of exercises: 1 while the rates warm up, then less and less."""
    done = step / plan.steps
    if done < plan.warmup_share:
        return 1.0
    return max(0.02, 0.4 * (1 - done / plan.exercises_until))


def _tokenizer(seed: int, plan: Plan) -> PreTrainedTokenizerFast:
    rng = random.Random(f"{seed} tokenizer")
    texts = (document(rng) for _ in range(plan.tokenizer_documents))
    return train_tokenizer(texts, plan.vocab_size, plan.max_positions)


def _model(tokenizer: PreTrainedTokenizerFast, plan: Plan) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=plan.vocab_size,
        hidden_size=plan.hidden_size,
        intermediate_size=plan.feed_forward_size,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.key_value_heads,
        head_dim=plan.head_dim,
        max_position_embeddings=plan.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_token_id(tokenizer, TURN_END),
        pad_token_id=_token_id(tokenizer, PAD),
    )
    model = cast(Qwen3ForCausalLM, cast(Any, Qwen3ForCausalLM)(config))
    for layer in model.model.layers:
        _let_attention_copy(cast(Any, layer).self_attn, plan)
    return model


@torch.no_grad()
def _let_attention_copy(attention: Any, plan: Plan) -> None:
    """Initialise a layer so that each token attends to similar tokens and copies their values.

    Trained attention layers often do this (Mimetic Initialization,
    https://arxiv.org/abs/2305.09828), so training need not find it. The output projection starts as
    the transpose of the value's, and in one head of each group the query's projection starts as the
    key's.
    """
    group = plan.heads // plan.key_value_heads
    heads = (plan.key_value_heads, plan.head_dim, plan.hidden_size)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.normal_(0, plan.hidden_size**-0.5)
    queries = attention.q_proj.weight.view(plan.key_value_heads, group, *heads[1:])
    queries[:, 0] = attention.k_proj.weight.view(heads)
    values = attention.v_proj.weight.view(heads).repeat_interleave(group, dim=0)
    attention.o_proj.weight.copy_(values.flatten(0, 1).T / group)


def optimizers_of(
    parameters: list[torch.nn.Parameter], embeddings: list[torch.nn.Parameter], plan: Plan
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Returns each optimizer with its peak rate: Muon for the inner matrices, AdamW for all else.

    Two cores have time for few steps only, and after 240 steps the loss was 0.94 with Muon
    (https://kellerjordan.github.io/posts/muon), and 3.16 with AdamW alone.
    """
    matrices = [p for p in parameters if p.dim() == 2 and not any(p is e for e in embeddings)]
    others = [p for p in parameters if p.dim() != 2 or any(p is e for e in embeddings)]
    return [
        (
            torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=plan.weight_decay),
            plan.matrix_rate,
        ),
        (
            torch.optim.AdamW(
                others, lr=plan.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            ),
            plan.embedding_rate,
        ),
    ]


def _fit(model: Qwen3ForCausalLM, training: Iterator[Batch], pad: int, plan: Plan) -> None:
    embedding = cast(torch.nn.Parameter, model.get_input_embeddings().weight)
    optimizers = optimizers_of([*model.parameters()], [embedding], plan)
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    model.train()
    tokens, smoothed = 0, 0.0
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=plan.steps, loss=0.0, speed=0.0)
        for step, batch in enumerate(islice(training, plan.steps)):
            loss = _loss(model, batch, pad)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.gradient_norm)
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * rate_factor(step, plan)
                optimizer.step()
                optimizer.zero_grad()
            tokens += sum(map(len, batch.rows))
            smoothed = loss.item() if step == 0 else 0.95 * smoothed + 0.05 * loss.item()
            speed = tokens / (progress.tasks[0].elapsed or math.inf)
            progress.update(task, advance=1, loss=smoothed, speed=speed)


@torch.no_grad()
def _validate(model: Qwen3ForCausalLM, validation: Iterator[Batch], pad: int) -> float:
    model.train(False)
    total, tokens = 0.0, 0
    for batch in validation:
        count = sum(len(row) - 1 for row in batch.rows)
        total += _loss(model, batch, pad).item() * count
        tokens += count
    return total / tokens


def _loss(model: Qwen3ForCausalLM, batch: Batch, pad: int) -> torch.Tensor:
    """Returns the mean loss in nats per token. Padding is at the right, so the causal mask
    suffices."""
    width = max(map(len, batch.rows))
    padded = torch.tensor([row + [pad] * (width - len(row)) for row in batch.rows])
    inputs, targets = padded[:, :-1], padded[:, 1:]
    targets = targets.masked_fill(targets == pad, IGNORED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )


def _save(
    out: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = cast(Any, GenerationConfig)(
        eos_token_id=[_token_id(tokenizer, TURN_END), _token_id(tokenizer, END_OF_TEXT)],
        pad_token_id=_token_id(tokenizer, PAD),
    )
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card, encoding="utf-8")


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def main() -> None:
    """Train the shipped model."""
    parser = argparse.ArgumentParser(description="Train the shipped model.")
    parser.add_argument(
        "--out", type=Path, default=MODEL_DIR, help="folder for the model (default: in place)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default: 0)")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="default: %(default)s")
    arguments = parser.parse_args()
    # Sums are split by the number of threads, which thereby changes their last bits.
    torch.set_num_threads(THREADS)
    loss = train(arguments.out, arguments.seed, Plan(steps=arguments.steps))
    print(f"saved to {arguments.out}, loss {loss:.3f}")


if __name__ == "__main__":
    main()
