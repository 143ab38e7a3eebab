"""The README.md that is saved beside the shipped model."""

CARD = """\
# The shipped model

A very small language model that writes little English stories and holds short conversations. It
is there so that promptq can be demonstrated and tested without a model hub; it knows next to
nothing.

- **Shape**: Qwen3 (5 layers, 6 query heads on 2 key-value heads, tied embeddings), bfloat16,
  under 5 MB; byte-level BPE tokenizer of 2,048 tokens; ChatML chat template.
- **Made by** `python -m training.train --seed {seed} --steps {steps}`: about ten minutes of
  two CPU cores that have nothing else to do.
- **Draft head**, in `mtp/`: `python -m training.draft_head`. It predicts further tokens, so that a
  step makes several, and changes no text.
- **Trained on** text that `training/texts/stories.py`, `chats.py` and `sketches.py` write
  themselves, every document seen once. Nothing was copied from anywhere.
- **Loss** on documents it has not seen: {loss:.3f} nats per token.
- **Ends** a story with `<|endoftext|>` and an answer with `<|im_end|>`.
- **License**: the same as the project.
"""


def model_card(seed: int, steps: int, loss: float) -> str:
    """The card of a model that was trained with this seed, so many steps, to this loss."""
    return CARD.format(seed=seed, steps=steps, loss=loss)
