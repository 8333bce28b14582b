"""How many parameters a model has, in all and on one rank."""

from .flags import Arguments


def count_parameters(args: Arguments) -> tuple[int, int]:
    """(all parameters, those of them in token embedding, position table and untied output layer); padding included."""
    layers = args.num_layers * _layer(args, 1)
    tables = _input(args, 1) + (_output(args, 1) if args.untie_embeddings_and_output_weights else 0)
    return layers + tables + _norm(args, args.hidden_size), tables


def parameters_on_stage(args: Arguments, stage: int) -> int:
    """Parameters of one rank of pipeline stage `stage` (0 first); a tied output layer is kept by both end stages."""
    tensor, last = args.tensor_model_parallel_size, args.pipeline_model_parallel_size - 1
    count = args.num_layers // args.pipeline_model_parallel_size * _layer(args, tensor)
    if stage == 0:
        count += _input(args, tensor)
    if stage == last:
        count += _norm(args, args.hidden_size)
        if args.untie_embeddings_and_output_weights or last > 0:
            count += _output(args, tensor)
    return count


def _layer(args: Arguments, tensor: int) -> int:
    """One layer on one of `tensor` ranks: projections are split; norms and row-parallel biases are not."""
    h, ffn = args.hidden_size, args.ffn_hidden_size * (2 if args.swiglu else 1)
    queries = args.kv_channels * args.num_attention_heads
    qkv = queries + 2 * args.kv_channels * args.num_query_groups
    split = h * qkv + queries * h + h * ffn + args.ffn_hidden_size * h
    whole = 2 * _norm(args, h) + (2 * _norm(args, args.kv_channels) if args.qk_layernorm else 0)
    if args.softmax_type == "learnable":
        split += args.num_attention_heads
    if args.add_bias_linear or args.add_qkv_bias:
        split += qkv
    if args.add_bias_linear:
        split += ffn
        whole += 2 * h
    return split // tensor + whole


def _norm(args: Arguments, width: int) -> int:
    return width * (2 if args.normalization == "LayerNorm" else 1)


def _input(args: Arguments, tensor: int) -> int:
    rows = args.padded_vocab_size // tensor
    if args.position_embedding_type == "learned_absolute":
        rows += args.max_position_embeddings
    return rows * args.hidden_size


def _output(args: Arguments, tensor: int) -> int:
    return args.padded_vocab_size // tensor * args.hidden_size
