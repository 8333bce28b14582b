"""PyTorch's flash attention for CPUs. Its public function returns no log-sum-exp, and no gradients of a block."""

import torch

CHECKED = {"torch": "2.11 to 2.15"}

# [b, heads, s, d] in and out, with the log-sum-exp [b, heads, s].
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
