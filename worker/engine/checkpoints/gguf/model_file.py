"""Reads a GGUF file of llama.cpp as a model: its configuration and its weights."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from promptq.shared.errors import UnsupportedModelError
from promptq.worker.engine.checkpoints.gguf.blocks import READERS, read_blocks
from promptq.worker.engine.checkpoints.gguf.header import GGUFHeader
from promptq.worker.engine.checkpoints.library_errors import LOADING_ERRORS, first_sentence
from promptq.worker.engine.checkpoints.saved_weights import SavedWeights
from promptq.worker.engine.quantization.weight import ExpertsWeight

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""The supported architectures, with transformers' names. `llama` with experts is `mixtral`."""
_NAMES: Any = GGUF_CONFIG_MAPPING
_FIELDS: dict[str, dict[str, str | None]] = {
    **_NAMES,
    "mixtral": {
        **_NAMES["llama"],
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    "qwen3_moe": {**_NAMES["qwen3_moe"], "expert_feed_forward_length": "moe_intermediate_size"},
}
"""For each family: transformers' names of settings, by the names in GGUF files."""
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""For each parameter of a layer's experts: the GGUF tensors that are joined to it."""
_ROUTER = "ffn_gate_inp.weight"
_ROTATED = ("attn_q", "attn_k")
"""Weights of the architecture `llama` whose rows llama.cpp's converter rearranges in pairs."""
_LLAMA3_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Settings that all models with rope scaling `llama3` have, and that GGUF files leave out."""
_LLAMA3_POSITIONS = 8192
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile:
    """A model in a GGUF file. The file is mapped into memory, so only the parts that are used are
    read."""

    generation_config: GenerationConfig | None = None

    def __init__(self, source: str) -> None:
        """Read the header. Raises ModelNotFoundError if the file cannot be read, and
        UnsupportedModelError if promptq does not support the model."""
        self.source = source
        self._header = header = GGUFHeader(source)
        self._tensors = header.tensors
        self._architecture = header.architecture
        if header.num_parts > 1:
            raise UnsupportedModelError(
                f"{source}: is one of {header.num_parts} parts; make one file of them with"
                " llama-gguf-split --merge"
            )
        if self._architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{source}: is of the architecture {self._architecture[:100]!r}, but promptq"
                f" reads only GGUF files of {', '.join(_ARCHITECTURES)}; use a directory of"
                " safetensors files, or --engine llama.cpp"
            )
        if strange := self._kinds - READERS.keys() - _DTYPES.keys():
            raise UnsupportedModelError(
                f"{source}: has weights of the type {min(strange)}, but promptq reads only"
                f" {', '.join((*READERS, *_DTYPES))}; use another file, or --engine llama.cpp"
            )
        self.config = self._config()

    @property
    def _kinds(self) -> set[str]:
        """The GGUF types of matrices, such as Q4_0. Routers, which are in fp32, do not count."""
        return {
            each.tensor_type.name
            for name, each in self._tensors.items()
            if len(each.shape) > 1 and not name.endswith(_ROUTER)
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the file's matrices; bf16 if the matrices are quantized or have several
        dtypes."""
        kinds = self._kinds
        return _DTYPES[kinds.pop()] if len(kinds) == 1 and kinds <= set(_DTYPES) else torch.bfloat16

    @property
    def is_quantized(self) -> bool:
        return bool(self._kinds - _DTYPES.keys())

    @property
    def num_saved_bytes(self) -> int:
        """Size of the file in bytes."""
        return Path(self.source).stat().st_size

    def num_bytes(self, dtype: torch.dtype | None) -> int:
        """Returns the bytes of all parameters in `dtype` (None: the file's dtype)."""
        numbers = sum(int(tensor.n_elements) for tensor in self._tensors.values())
        return numbers * (dtype or self.dtype).itemsize

    def _config(self) -> PreTrainedConfig:
        try:
            family = _ARCHITECTURES[self._architecture]
            if family == "llama" and self._header.own_field("expert_count"):
                family = "mixtral"
            layers = self._header.own_field("block_count")
            if isinstance(layers, int | float) and layers > len(self._tensors):
                raise UnsupportedModelError(
                    f"{self.source}: its block_count is {layers}, more than its"
                    f" {len(self._tensors)} tensors"
                )
            settings: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(family, {}))
            settings |= {
                name: value
                for field, name in _FIELDS[family].items()
                if name and (value := self._header.own_field(field)) is not None
            }
            settings["vocab_size"] = self._header.vocab_size
            settings["tie_word_embeddings"] = "output.weight" not in self._tensors
            config: Any = AutoConfig.for_model(family, **settings)
            self._complete(config)
        except LOADING_ERRORS as error:
            raise UnsupportedModelError(
                f"{self.source}: its settings cannot be read: {first_sentence(error)}"
            ) from error
        complete: PreTrainedConfig = config
        return complete

    def _complete(self, config: Any) -> None:
        """Set the fields of `config` for which transformers' GGUF_CONFIG_MAPPING has no entry."""
        saved_size = self._header.own_field("attention.key_length")
        size = saved_size or getattr(config, "head_dim", None)
        config.head_dim = size = int(size or config.hidden_size // config.num_attention_heads)
        scaling = self._header.own_field("rope.scaling.type")
        if scaling not in (None, "none"):
            raise UnsupportedModelError(
                f"{self.source}: its positions are scaled by {scaling!r}, which is not supported in"
                " GGUF files; use a directory of safetensors files"
            )
        neutral = {
            "rope.scale_linear": 1,
            "rope.scaling.factor": 1,
            "rope.dimension_count": size,
            "attention.value_length": size,
            "attention.scale": size**-0.5,
            "expert_gating_func": 1,  # softmax
            "expert_weights_norm": True,
            "expert_weights_scale": 1,
            "expert_shared_count": 0,
        }
        for name, value in neutral.items():
            saved = self._header.own_field(name)
            if saved is not None and not abs(saved - value) <= 1e-6:  # or it is NaN
                raise UnsupportedModelError(
                    f"{self.source}: {name} is {saved}, which is not supported in GGUF files; use a"
                    " directory of safetensors files"
                )
        if _LLAMA3_FREQUENCIES in self._tensors:
            self._scale_positions(config)
        config.eos_token_id = sorted(self._header.end_token_ids) or None
        config.dtype = self.dtype

    def quantized_weights(self, dtype: torch.dtype) -> SavedWeights:
        """Returns the weights for computation in `dtype`. Raises UnsupportedModelError if the
        file's tensors are not those of the model."""
        blocks = sorted(self._kinds - _DTYPES.keys())
        saved = SavedWeights(f"GGUF {'/'.join(blocks)}" if blocks else "", dtype)
        places = self._places()
        for name, (place, *_) in places.items():
            module, _, part = name.rpartition(".")
            if part == "gate_up_proj":
                of_experts = [*places[name], *places[f"{module}.down_proj"]]
                self._add_experts(saved, module, of_experts)
            if part in _EXPERTS:
                continue
            tensor = self._tensors[place]
            kind = tensor.tensor_type.name
            rows = self._rows(place)
            if kind in READERS:
                weight = read_blocks(torch.from_numpy(tensor.data.copy()), kind)
                saved.add(module, weight if rows is None else weight.rows(rows))
                continue
            numbers = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            saved.add_tensor(name, (numbers if rows is None else numbers[rows]).clone())
        return saved

    def _add_experts(self, saved: SavedWeights, module: str, places: list[str]) -> None:
        """Add a layer's experts. `places` are the names of the gate, up and down tensors."""
        tensors = [self._tensors[place] for place in places]
        if all(tensor.tensor_type.name in READERS for tensor in tensors):
            parts = []
            for tensor in tensors:
                count, _, row_bytes = tensor.data.shape
                rows = torch.from_numpy(tensor.data.reshape(-1, row_bytes).copy())
                parts.append(read_blocks(rows, tensor.tensor_type.name).split(count))
            gates, ups, downs = parts
            saved.add(module, ExpertsWeight([*zip(gates, ups, downs, strict=True)]))
            return
        gate, up, down = (
            torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors
        )
        saved.add_tensor(f"{module}.gate_up_proj", torch.cat((gate, up), 1))
        saved.add_tensor(f"{module}.down_proj", down.clone())

    def _places(self) -> dict[str, list[str]]:
        """Returns the names of the file's tensors for each parameter of the model."""
        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        names = get_tensor_name_map(numbers[self._architecture], self.config.num_hidden_layers)
        library: Any = AutoModelForCausalLM  # only partly typed
        with torch.device("meta"):
            model = library.from_config(self.config)
        places = {}
        for parameter, weight in model.named_parameters():  # a shared parameter comes once
            module, _, part = parameter.rpartition(".")
            if part in _EXPERTS:
                modules = [f"{module}.{each}" for each in _EXPERTS[part]]
                own = [f"{names.get_name(each)}.weight" for each in modules]
            else:
                own = [f"{names.get_name(module)}.{part}"]
            places[parameter] = own
            if not self._tensors.keys() >= {*own}:
                continue
            count = sum(int(self._tensors[place].n_elements) for place in own)
            if count != weight.numel():
                # transformers would fill the memory with a weight of the other size.
                raise UnsupportedModelError(
                    f"{self.source}: {own[0]} has {count // len(own)} numbers, and"
                    f" {type(model).__name__} needs {weight.numel() // len(own)}"
                )
        known = {*chain(*places.values())}
        if missing := sorted(known - self._tensors.keys()):
            raise UnsupportedModelError(
                f"{self.source}: {len(missing)} weights that {type(model).__name__} needs are"
                f" missing, for example {missing[0]}"
            )
        if unknown := self._tensors.keys() - known - {_LLAMA3_FREQUENCIES}:
            raise UnsupportedModelError(
                f"{self.source}: it has {len(unknown)} tensors that {type(model).__name__} does not"
                f" know, for example {min(unknown)}"
            )
        return places

    def _rows(self, place: str) -> torch.Tensor | None:
        """Returns the file's row number of each transformers row; None if the order is equal."""
        part = place.split(".")[-2]
        if self._architecture != "llama" or part not in _ROTATED:
            return None
        config: Any = self.config
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        rows = torch.arange(heads * config.head_dim)
        return rows.view(heads, config.head_dim // 2, 2).transpose(1, 2).flatten()

    def _scale_positions(self, config: Any) -> None:
        """Set the rope scaling of Llama 3. The file has only the factors of the frequencies."""
        factors = torch.from_numpy(self._tensors[_LLAMA3_FREQUENCIES].data.copy())
        plain = dict(config.rope_parameters)
        config.rope_parameters = {
            **plain,
            **_LLAMA3,
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "original_max_position_embeddings": _LLAMA3_POSITIONS,
        }
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        expected = plain["rope_theta"] ** -exponents / factors
        if scaled.shape != expected.shape or not torch.allclose(scaled, expected, rtol=1e-4):
            raise UnsupportedModelError(
                f"{self.source}: its positions are not scaled like those of Llama 3; use a"
                " directory of safetensors files"
            )
