"""The model that comes with promptq, so that demo and tests need no model hub."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""The directory of the shipped model, for ``AutoModelForCausalLM.from_pretrained``."""

MODEL_NAME: Final = "promptq-stories"
"""The shipped model's name in requests and statistics."""
