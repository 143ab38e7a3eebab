"""Refuses a model's files that lead out of its folder or have absurd sizes.

A model may come from a stranger. A link to `/proc/self/environ` as a chat template would show the
process' secrets to every client that sends a chat. A FIFO would block the start for ever.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from promptq.shared.errors import ModelNotFoundError, UnsupportedModelError

_READ = frozenset({".jinja", ".json", ".model", ".py", ".safetensors", ".spm", ".tiktoken", ".txt"})
"""Endings of the files that promptq or transformers may read."""
MAX_BYTES = 128 * 2**20
"""The most bytes of a file without weights. Gemma's tokenizer, one of the largest, has 33 MB."""
HEAD_FOLDER = "mtp"
_FOLDERS = ("", "additional_chat_templates", "1_Pooling", HEAD_FOLDER)
_COUNTS = re.compile(r"(num|n)_(\w+_)?(layers?|experts|blocks?|labels)|block_count")
MAX_PARTS = 2000
"""The most layers, experts of a layer, or labels. transformers creates an object for each."""
_SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"),
    *("head_dim", "num_attention_heads", "num_key_value_heads"),
)
"""Sizes of a model's matrices. `check_sizes` multiplies all other sizes by `hidden_size`."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_CONTENTS = ("vocab", "merges")
"""Tokenizer settings that have either the content of a file or the file's name."""
_LONGEST_NAME = 200
_INDEX = "model.safetensors.index.json"


def check_files(folder: Path) -> None:
    """Raise UnsupportedModelError if a file is outside the folder, too large, or not regular. Links
    to the folder `blobs` beside `snapshots` are allowed: the hub's cache consists of such links."""
    for name in _FOLDERS:
        place = folder / name
        for file in sorted(place.iterdir()) if place.is_dir() else ():
            if file.suffix not in _READ:
                continue
            target = Path(os.path.realpath(file))  # `resolve` fails at a link to itself
            if not _is_inside(target, folder):
                raise UnsupportedModelError(
                    f"{folder}: {file.relative_to(folder)} leads out of the folder; put the file"
                    " itself there"
                )
            if target.exists() and not target.is_file():
                raise UnsupportedModelError(
                    f"{folder}: {file.relative_to(folder)} is not a regular file"
                )
            is_whole = file.suffix != ".safetensors" and target.exists()
            if is_whole and (size := target.stat().st_size) > MAX_BYTES:
                raise UnsupportedModelError(
                    f"{folder}: {file.relative_to(folder)} has {size:,} bytes; at most"
                    f" {MAX_BYTES:,} are read"
                )


def check_tokenizer_config(source: str, config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if `tokenizer_config.json` names a file outside the model's
    folder. transformers would read some such files, and turn the content into tokens."""
    for name, value in config.items():
        if not isinstance(value, str) or not (name in _CONTENTS or name.endswith("_file")):
            continue
        if os.path.exists(value) and not _is_inside(Path(os.path.realpath(value)), Path(source)):
            raise UnsupportedModelError(
                f"{source}: tokenizer_config.json has {name} {value[:100]!r}, a file that is not"
                " the model's"
            )


def _is_inside(target: Path, folder: Path) -> bool:
    """Whether a file is in the folder or in the hub's cache."""
    home = folder.resolve()
    homes = [home, Path(HF_HUB_CACHE).resolve()]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    return any(target.is_relative_to(root) for root in homes)


def check_config(source: str, config: Any) -> None:
    """Raise UnsupportedModelError for counts in a `config.json` that would make transformers
    hang."""
    left = [config]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item.values()
            for name, value in item.items():
                if isinstance(value, int | float) and value > MAX_PARTS and _COUNTS.fullmatch(name):
                    raise UnsupportedModelError(
                        f"{source}: config.json has {name} {value}, more than {MAX_PARTS}"
                    )


def check_sizes(source: str, config: Any, num_numbers: int) -> None:
    """Raise UnsupportedModelError if one matrix would have more elements than all files together,
    because transformers would fill the memory with this matrix. `num_numbers` is the number of
    elements of all files."""
    # `vars` reads plain values: an attribute that differs between layers raises an error.
    sizes = {name: vars(config).get(config.attribute_map.get(name, name)) for name in _SIZES}
    hidden_size = sizes["hidden_size"]
    for name, size in sizes.items():
        if not isinstance(size, int) or not isinstance(hidden_size, int):
            continue
        others = hidden_size if name != "hidden_size" else 1
        if size * others > num_numbers:
            raise UnsupportedModelError(
                f"{source}: config.json has {name} {size}, and a matrix of {size} x {others} has"
                f" more numbers than all its weights ({num_numbers})"
            )


def check_experts(source: str, config: Any, *, has_weights: Callable[[], bool]) -> None:
    """Raise UnsupportedModelError if a token would use no expert, or more experts than there are.
    Checks groups of experts in the same way.

    In some families, a model with 0 experts is dense. `has_weights` returns whether the files
    nevertheless contain experts.
    """

    def count(names: tuple[str, ...]) -> tuple[str, int] | None:
        in_file = [config.attribute_map.get(name, name) for name in names]
        counts = {name: vars(config).get(name) for name in in_file}
        return next(((name, each) for name, each in counts.items() if isinstance(each, int)), None)

    experts, active = count(_EXPERTS), count(_ACTIVE_EXPERTS)
    if experts is None or active is None or (experts[1] == 0 and not has_weights()):
        return
    if not 1 <= active[1] <= experts[1]:
        raise UnsupportedModelError(
            f"{source}: config.json has {active[0]} {active[1]} and {experts[0]} {experts[1]}; a"
            " token needs at least one expert, and at most all of them"
        )
    groups, top_groups = count(("n_group",)), count(("topk_group",))
    if groups is None or top_groups is None or getattr(config, "topk_method", "") == "greedy":
        return
    if groups[1] < 1 or experts[1] % groups[1] or not 1 <= top_groups[1] <= groups[1]:
        raise UnsupportedModelError(
            f"{source}: config.json has {groups[0]} {groups[1]}, {top_groups[0]} {top_groups[1]}"
            f" and {experts[0]} {experts[1]}; groups must be of equal sizes, and a token needs at"
            " least one group, and at most all of them"
        )


def read_config(file: Path, source: str) -> dict[str, Any]:
    """Returns the content of a `config.json`. Raises ModelNotFoundError if the file cannot be read,
    is not JSON, or has no `model_type`."""
    try:
        config = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ModelNotFoundError(f"{source}: {file.name} is nested too deeply") from error
    except (ValueError, OSError) as error:
        raise ModelNotFoundError(f"{source}: {file.name} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelNotFoundError(f"{source}: {file.name} has no model_type")
    return config


def shards_of(folder: Path, source: str) -> list[str] | None:
    """Returns the names of the files that the folder's index names; None if there is no index.

    Raises UnsupportedModelError if the index cannot be read. Also raises this error for a name that
    is not a safetensors file of the folder, because transformers would unpickle a `.bin`.
    """
    index = folder / _INDEX
    if not index.exists():
        return None
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(
            f"{source}: {_INDEX} does not say which files there are: {reason}"
        ) from error
    for name in sorted(names):
        is_file_name = name.isprintable() and len(name) <= _LONGEST_NAME
        if not is_file_name or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise UnsupportedModelError(
                f"{source}: {_INDEX} names {name[:100]!r}, and only safetensors files beside it are"
                " read"
            )
    return sorted(names)
