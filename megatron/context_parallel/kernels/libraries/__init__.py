"""Full and causal blocks by the attention libraries for CUDA, a file each."""

from .aten import AtenFlashCuda
from .base import Capability, Library
from .cudnn import Cudnn
from .flash2 import FlashAttention2
from .flash3 import FlashAttention3
from .flash4 import FlashAttention4

__all__ = ["LIBRARIES", "Capability", "Library"]

LIBRARIES: dict[str, type[Library]] = {
    library.name: library for library in (AtenFlashCuda, Cudnn, FlashAttention2, FlashAttention3, FlashAttention4)
}
