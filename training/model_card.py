"""The README.md that is saved beside the shipped model."""

CARD = """\
# The shipped model

This very small language model writes little English stories and holds short conversations. With
it, you can try and test promptq without a model hub. The model knows next to nothing.

- **Shape**: Qwen3 (5 layers, 6 query heads on 2 key-value heads, tied embeddings), bfloat16,
  under 5 MB; byte-level BPE tokenizer of 2,048 tokens; ChatML chat template.
- **Made by** `python -m training.train --seed {seed} --steps {steps}`: about ten minutes on
  two CPU cores that do nothing else.
- **Draft head**, in `mtp/`: `python -m training.draft_head`. It predicts further tokens, so that a
  step makes several, and changes no text.
- **Trained on** text that `training/texts/stories.py`, `chats.py` and `sketches.py` generate. The
  model saw every document once. No text was copied from anywhere.
- **Loss** on documents that the model has not seen: {loss:.3f} nats per token.
- **Ends** a story with `<|endoftext|>` and an answer with `<|im_end|>`.
- **License**: the same as the project.
"""


def model_card(seed: int, steps: int, loss: float) -> str:
    """Returns the card of a model that reached this loss, with this seed and number of steps."""
    return CARD.format(seed=seed, steps=steps, loss=loss)
