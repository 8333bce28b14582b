"""megatron-core's model configuration, with what its layers read without declaring it, and what only Gemma has."""

from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig


@dataclass
class ModelConfig(TransformerConfig):
    """The configuration of the trainer's models.

    Attributes:
        scale_embeddings: token embeddings are multiplied by sqrt(hidden_size).
        sandwich_norm: the outputs of attention and MLP are normalized before they are added to the residual.
        rotary_base_of_windows: rotary base of the layers with a window; None: all layers have the same.
        yarn_rotary_scaling_factor, yarn_mscale, yarn_mscale_all_dim: of them megatron-core's attention makes the
            number that rotated queries and keys are multiplied by. It is 1 without YaRN.
    """

    scale_embeddings: bool = False
    sandwich_norm: bool = False
    rotary_base_of_windows: int | None = None
    yarn_rotary_scaling_factor: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
