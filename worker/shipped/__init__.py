"""The model that promptq brings along, so that demo and tests need no model hub."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""Directory of the shipped model: what ``AutoModelForCausalLM.from_pretrained`` is given."""

MODEL_NAME: Final = "promptq-stories"
"""What requests and statistics call it."""
