"""Trains the shipped model's draft head: ``python -m training.draft_head``.

The head predicts the token after the next one (multi-token prediction, DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2). The head is a decoder layer like those of the model.
It uses the model's embedding and output layer, which training does not change. Workers also apply
the head to the head's output, so training does so, too. The targets are the model's own
distributions, because a draft counts only if the model would have chosen it.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
)

from promptq.worker.shipped import MODEL_DIR
from training.corpus import Batch, batches
from training.train import Plan, optimizers_of

FILE = Path("mtp", "model.safetensors")
"""A separate file, so that programs that do not know heads can read the model."""


@dataclass(frozen=True)
class HeadPlan:
    """The settings of the head's training."""

    steps: int = 700
    warmup_steps: int = 20
    cooldown_share: float = 0.4
    batch_tokens: int = 640
    max_row_tokens: int = 512
    depth: int = 3
    depth_weight: float = 0.8
    start_batches: int = 8
    validation_batches: int = 8


@dataclass(frozen=True)
class _Rows:
    """A batch, and what the model computes from it."""

    token_ids: torch.Tensor  # [rows, width]
    states: torch.Tensor  # [rows, width, hidden size]
    last_inputs: torch.Tensor  # [rows, width, hidden size], of the model's last layer
    counted: torch.Tensor  # [count], the predictions that count, as places in [rows, width - 1]
    shares: torch.Tensor  # [count, vocabulary], the model's distributions for these predictions


def train_head(folder: Path, seed: int = 0, plan: HeadPlan | None = None) -> list[float]:
    """Train a head for the model in ``folder`` and save it there.

    Returns for each depth the probability that a draft is right, if head and model choose from
    their distributions with the same random number.
    """
    plan = plan or HeadPlan()
    tokenizer = cast(Any, PreTrainedTokenizerFast).from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cast(nn.Module, model).requires_grad_(False).eval()

    def encode(texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in tokenizer(texts)["input_ids"]]

    sizes = plan.batch_tokens, plan.max_row_tokens
    training = batches(random.Random(f"{seed} head"), encode, *sizes)
    validation = batches(random.Random(f"{seed} validate head"), encode, *sizes)
    head = _new_head(model, islice(training, plan.start_batches))
    _fit(model, head, training, plan)
    accepted = _validate(model, head, islice(validation, plan.validation_batches), plan, seed)
    _save(folder, head, model.config.num_hidden_layers)
    return accepted


@torch.no_grad()
def _new_head(model: Qwen3ForCausalLM, batches: Iterator[Batch]) -> MtpLayer:
    """Returns a head that starts as the model's last layer and norm. Its projection starts as the
    linear map whose results come closest to the inputs of that layer."""
    config = model.config
    head = MtpLayer(config, Qwen3DecoderLayer, Qwen3RMSNorm, 0)
    head.mtp_block.load_state_dict(model.model.layers[-1].state_dict())
    cast(nn.Module, head.post_norm).load_state_dict(model.model.norm.state_dict())
    size = config.hidden_size
    squares = 1e-3 * torch.eye(2 * size, dtype=torch.float64)
    products = torch.zeros(2 * size, size, dtype=torch.float64)
    for batch in batches:
        rows = _rows(model, batch)
        inputs = _counted(_inputs(head, _embedded(model, head, rows), rows.states[:, :-1]), rows)
        squares += inputs.T.double() @ inputs.double()
        products += inputs.T.double() @ _counted(rows.last_inputs[:, 1:], rows).double()
    head.eh_proj.weight.copy_(torch.linalg.solve(squares, products).T)
    return head.requires_grad_(True).train()


def _fit(
    model: Qwen3ForCausalLM, head: MtpLayer, training: Iterator[Batch], plan: HeadPlan
) -> None:
    optimizers = optimizers_of([*head.parameters()], [], Plan())
    with Progress() as progress:
        task = progress.add_task("train the head", total=plan.steps)
        for step, batch in enumerate(islice(training, plan.steps)):
            rows = _rows(model, batch)
            with _fast_products():
                logits = _predictions(model, head, rows, plan.depth)
            weights = [plan.depth_weight**depth for depth in range(plan.depth)]
            losses = [_loss(each, rows) for each in logits]
            loss = torch.stack(losses) @ torch.tensor(weights) / sum(weights)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * rate_factor(step, plan)
                optimizer.step()
                optimizer.zero_grad()
            progress.update(task, advance=1)
            if step % 50 == 0:
                progress.print(f"{step}: " + " ".join(f"{each.item():.3f}" for each in losses))


def rate_factor(step: int, plan: HeadPlan) -> float:
    """Returns the factor of the learning rates. The factor rises linearly to 1 at the beginning,
    and falls linearly to 0 at the end. So a longer training begins like a shorter one."""
    return min(
        1.0,
        (step + 1) / plan.warmup_steps,
        (plan.steps - step) / (plan.cooldown_share * plan.steps),
    )


def _fast_products() -> torch.autocast:
    """Returns a context that computes products in bf16 if the processor has instructions for it.
    Without them, bf16 takes twice as long as fp32."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16)


@torch.no_grad()
def _rows(model: Qwen3ForCausalLM, batch: Batch) -> _Rows:
    """Runs the model on a batch. Padding is at the right, so the causal mask suffices."""
    width = max(map(len, batch.rows))
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in batch.rows])
    lengths = torch.tensor([len(row) for row in batch.rows]).unsqueeze(1)
    counted = (torch.arange(1, width) < lengths).flatten().nonzero().squeeze(1)
    with _fast_products():
        hidden = model.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        states = hidden.last_hidden_state
        logits = model.lm_head(states[:, 1:].flatten(0, 1).index_select(0, counted))
    last_inputs = hidden.hidden_states[-2].float()
    return _Rows(token_ids, states.float(), last_inputs, counted, logits.float().softmax(-1))


def _counted(values: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Returns the values [rows, width - 1, size] of predictions that count, as [count, size]."""
    return values.flatten(0, 1).index_select(0, rows.counted)


def _embedded(model: Qwen3ForCausalLM, head: Any, rows: _Rows) -> torch.Tensor:
    return cast(torch.Tensor, head.enorm(model.model.embed_tokens(rows.token_ids[:, 1:])))


def _inputs(head: Any, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    return torch.cat([embedded, head.hnorm(states)], dim=-1)


def _predictions(model: Qwen3ForCausalLM, head: Any, rows: _Rows, depth: int) -> list[torch.Tensor]:
    """Returns logits [count, vocabulary] of each depth. Position i predicts the token after token i
    + 1. Its inputs are token i + 1 and a hidden state of the position before. At the first depth,
    this is the model's state; at greater depths, the head's state."""
    embedded = _embedded(model, head, rows)
    places = torch.arange(embedded.shape[1]).unsqueeze(0)
    rotation = model.model.rotary_emb(embedded, places)
    states = rows.states[:, :-1]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    predictions = []
    for _ in range(depth):
        hidden = head.eh_proj(_inputs(head, embedded, states))
        states = head.post_norm(_layer(head.mtp_block, hidden, rotation, keys, values))
        predictions.append(model.lm_head(_counted(states, rows)))
        states = functional.pad(states, (0, 0, 1, 0))[:, :-1]
    return predictions


def _layer(
    layer: Any, hidden: torch.Tensor, rotation: Any, keys: list[Any], values: list[Any]
) -> torch.Tensor:
    """Computes a depth, and adds its K and V to those of the depths before.

    A row of depth d sees what a worker's cache has at that time. The last d - 1 of the rows that it
    sees come from depths 2 to d, one row from each depth. The last of them is the row itself. All
    earlier rows come from the first depth.
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    query = attention.q_norm(attention.q_proj(normed).view(shape)).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(normed).view(shape)).transpose(1, 2)
    value = attention.v_proj(normed).view(shape).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *rotation)
    group = attention.num_key_value_groups
    keys.append(key.repeat_interleave(group, dim=1))
    values.append(value.repeat_interleave(group, dim=1))
    everywhere = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool)
    seen = [everywhere.tril(1 - len(keys))]
    seen += [everywhere.tril(back).triu(back) for back in range(2 - len(keys), 1)]
    attended = functional.scaled_dot_product_attention(
        query, torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(seen, dim=1)
    )
    merged = attended.transpose(1, 2).flatten(2)
    hidden = hidden + attention.o_proj(merged)
    return cast(torch.Tensor, hidden + layer.mlp(layer.post_attention_layernorm(hidden)))


def _loss(logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Returns the mean cross entropy with the model's distributions, in nats per token. A draft
    after the last known token of a row counts too."""
    return functional.cross_entropy(logits.float(), rows.shares)


@torch.no_grad()
def _validate(
    model: Qwen3ForCausalLM,
    head: MtpLayer,
    validation: Iterator[Batch],
    plan: HeadPlan,
    seed: int,
) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    head.train(False)
    right = torch.zeros(plan.depth)
    total = 0
    for batch in validation:
        rows = _rows(model, batch)
        uniform = torch.rand(len(rows.shares), 1, generator=generator)
        wanted = _drawn(rows.shares, uniform)
        for depth, logits in enumerate(_predictions(model, head, rows, plan.depth)):
            right[depth] += (_drawn(logits.softmax(-1), uniform) == wanted).sum()
        total += len(wanted)
    return (right / total).tolist()


def _drawn(shares: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draws as workers do: returns the first token, in the order of the vocabulary, at which the
    cumulative sum exceeds the random number."""
    return (shares.double().cumsum(-1) <= uniform).sum(-1)


def _save(folder: Path, head: MtpLayer, num_layers: int) -> None:
    """Save the head as GLM-4.5 and DeepSeek-V3 name its weights: as one more layer."""
    tensors = {}
    for name, weight in head.state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors[f"model.layers.{num_layers}.{name}"] = weight.detach().bfloat16().contiguous()
    (folder / FILE).parent.mkdir(exist_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def main() -> None:
    """Train the draft head of the shipped model."""
    parser = argparse.ArgumentParser(description="Train the draft head of the shipped model.")
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL_DIR,
        help="model to train a head for (default: the shipped one)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the data (default: 0)")
    parser.add_argument("--steps", type=int, default=HeadPlan.steps, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the number of threads decides the last bits of sums
    accepted = train_head(arguments.model, arguments.seed, HeadPlan(steps=arguments.steps))
    shares = ", ".join(f"{each:.2f}" for each in accepted)
    print(f"saved to {arguments.model / FILE}, drafts that are right by depth: {shares}")


if __name__ == "__main__":
    main()
