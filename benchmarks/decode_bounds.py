"""Predicts a decode step of Llama 3 8B in bf16 on 8 H100 of a node (`dgx-h100`), and what bounds it.

PYTHONPATH=. python benchmarks/decode_bounds.py
"""

from rich.table import Table

from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.decode_time import KERNELS, MERGE_KERNELS, decode_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

RANKS = 8
BATCHES = {8_192: (8, 64, 256), 131_072: (1, 8, 24), 1_000_000: (1, 3)}  # sequences that fit in the memory, by tokens
HOST = 120e-6  # seconds of Python per layer: benchmarks/decode_step.py on 2 ranks, 1 sequence, without the products


def main() -> None:
    columns = ("tokens", "sequences", "keys", "weights", "kernels", "messages", "step", "host without a graph")
    table = Table(*columns, title="milliseconds of a decode step, predicted")
    cluster = load_cluster("dgx-h100")
    run = TrainConfig(seq_length=RANKS, context_parallel_size=RANKS)
    for context, batches in BATCHES.items():
        model = preset_model("llama3-8b", context)
        layers, device = model.num_layers, cluster.device
        memory = device.memory_GB_s * 1e9
        embedding = model.padded_vocab_size * model.hidden_size  # only some rows are read
        weights = run.itemsize * (model.parameters - embedding) / memory
        launches = (KERNELS + MERGE_KERNELS) * device.kernel_us + RANKS * device.block_us
        for batch in batches:
            token = layers * 2 * model.keys * run.itemsize / memory  # seconds to read a token's keys and values
            padded = -(-batch // RANKS) * context * token  # the predictor has as many rows on each rank
            messages = max(0.0, decode_step(model, run, cluster, context, batch).step - padded - weights)
            kernels = min(layers * launches * 1e-6, messages)
            parts = batch * context / RANKS * token, weights, kernels, messages - kernels
            shown = [f"{1e3 * x:.1f}" for x in (*parts, sum(parts), HOST * layers)]
            table.add_row(f"{context:,}", str(batch), *shown)
    show(table)


if __name__ == "__main__":
    main()
