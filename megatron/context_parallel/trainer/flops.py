"""Floating-point operations of a training iteration."""

from .flags import Arguments


def flops_per_sequence(args: Arguments) -> float:
    """Floating-point operations of one sequence, forward and backward, over all ranks.

    A matrix product of m x k by k x n is 2mkn; the backward pass is twice the forward pass. Per token and layer, with
    h = hidden_size, a = kv_channels * num_attention_heads and g = kv_channels * num_query_groups:

        2h(a + 2g) + 2ah        projections
        2 * 2 * a * seen        attention: QK^T and PV; of s tokens s / 2 are seen, of a window w < s, w - w^2 / 2s
        2h * ffn * (3 or 2)     MLP: three products for SwiGLU, else two

    and 2h * padded_vocab_size for the logits. Recomputation does not count; packed documents count as one.
    """
    h, s = args.hidden_size, args.seq_length
    a, g = args.kv_channels * args.num_attention_heads, args.kv_channels * _kv_heads(args)
    window = args.window_size[0] if args.window_size else -1
    window = s if window < 0 else min(window, s)
    seen = window - window**2 / (2 * s)
    layer = 2 * h * (a + 2 * g) + 2 * a * h + 4 * a * seen + 2 * h * args.ffn_hidden_size * (3 if args.swiglu else 2)
    return 3.0 * s * (args.num_layers * layer + 2 * h * args.padded_vocab_size)


def _kv_heads(args: Arguments) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads
