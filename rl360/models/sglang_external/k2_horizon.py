"""K2 Horizon for SGLang before 0.5.20: its Llama, with grouped norms, and strict about what it loads.

In: the checkpoint's configuration and its tensors under their Hugging Face names, at the start and at every weight
update. Out: `EntryClass`, which SGLang serves. Attention, tensor and pipeline parallelism, CUDA graphs and the weight
loaders are SGLang's. Imported by SGLang only, see rl360.models.sglang_external.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.models.llama import LlamaForCausalLM
from torch import Tensor, nn

from rl360.models.architecture import DecoderConfig
from rl360.models.sglang_external.grouped_norm import GroupedRMSNorm
from rl360.models.weight_files import IGNORED_SUFFIX, expected_tensors


class K2HorizonForCausalLM(LlamaForCausalLM):
    """The name is the checkpoint's `architectures` entry: SGLang finds the class by it."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        numbers = DecoderConfig.from_hf(config.to_dict(), "the checkpoint's config.json")
        # SGLang's Llama takes theta from rope_parameters where there are any, and 10000 if theta is not among them.
        config.rope_parameters = {"rope_type": "default", "rope_theta": numbers.rope_theta}
        config.rope_theta = numbers.rope_theta
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        self._tensors = frozenset(expected_tensors(numbers))

        def norm() -> GroupedRMSNorm:
            return GroupedRMSNorm(numbers.hidden_size, numbers.norm_groups, numbers.rms_norm_eps)

        for layer in self.model.layers:
            if _is_here(getattr(layer, "input_layernorm", None)):
                layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
        if _is_here(self.model.norm):
            self.model.norm = norm()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """As Llama's, but a tensor that the model does not have is an error: SGLang itself would only warn."""
        return super().load_weights(self._known(weights))

    def _known(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name not in self._tensors and not name.endswith(IGNORED_SUFFIX):
                raise ValueError(f"tensor {name} is not in this K2 Horizon; expected Hugging Face names, unpacked")
            yield name, tensor


def _is_here(norm: nn.Module | None) -> bool:
    """Whether a pipeline stage holds this norm, or only a stand-in for another stage's."""
    return getattr(norm, "weight", None) is not None


EntryClass = K2HorizonForCausalLM
