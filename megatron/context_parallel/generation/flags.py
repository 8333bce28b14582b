"""The flags of the programs that generate text."""

from dataclasses import replace

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.choose import CHOICES
from megatron.context_parallel.kernels.names import KV_CACHE_DTYPES
from megatron.context_parallel.trainer.config.flags import Arguments


class Source(FlagSection, title="model"):
    load: str = flag(
        "a directory of trainer checkpoints, or a HuggingFace folder, such as of Llama, in safetensors",
        unit="DIR",
        example="runs/quickstart",
    )
    ckpt_step: int | None = flag("iteration to load", derived="the latest", at_least=0, example=100)
    load_fallback: bool = flag("load the newest complete checkpoint if the selected one is not complete", False)
    tensor_model_parallel_size: int = flag("number of ranks that split every layer; the rest share the sequences", 1)
    bf16: bool = flag("compute in bfloat16, for weights of any dtype", False)


class CacheFlags(FlagSection, title="cache"):
    cache_tokens: int | None = flag(
        "size of the cache in tokens, over all ranks", derived="the positions of the model", example=8192
    )
    cp_prefill: str = flag("what a prefill sends: keys and values, or queries", "auto", choices=CHOICES)
    cluster: str | None = flag(
        "preset or file of a cluster, for predicted times of prefills",
        unit="NAME",
        derived="auto counts bytes",
        example="dgx-h100",
    )
    cp_prefill_constants: list[float] | None = flag(
        "alpha, beta and gamma of the empirical formula, fitted to measured times",
        needs="cp_prefill=empirical",
        read=float,
        example=1.0,
    )
    kv_cache_dtype: str = flag(
        "keys and values in the cache and between ranks: auto is the dtype of the model, the others have 8 bits and a "
        "scale for each row and head",
        "auto",
        choices=KV_CACHE_DTYPES,
    )
    inference_dynamic_batching_max_tokens: int | None = flag(
        "maximum prompt tokens in one step",
        derived="by predicted time with --cluster, otherwise 512 for each context rank",
        at_least=1,
        example=8192,
    )


class TimeLimits(FlagSection, title="time limits"):
    distributed_timeout_minutes: int = flag("time limit for a rank to wait for another", 10, unit="MINUTES")
    distributed_timeout_seconds_after_init: int = flag(
        "end the job if a rank does not respond for so long, after the first iteration", 60, unit="SECONDS", at_least=2
    )


def check_prefill(flags: CacheFlags) -> None:
    """Reject a `--cp-prefill` without the flags that it needs, before the ranks meet.

    Raises:
        UsageError: a required cluster or constants are missing, or the cluster cannot be read.
    """
    how = f"--cp-prefill {flags.cp_prefill}"
    constants = flags.cp_prefill_constants
    if flags.cp_prefill in ("alg1", "alg5") and not flags.cluster:
        raise UsageError(f"{how}: needs the rates of a cluster; give --cluster dgx-h100, or --cp-prefill auto")
    if flags.cp_prefill == "empirical" and not constants:
        why = "needs constants fitted to your own measurements, the paper's constants contradict its own"
        raise UsageError(f"{how}: {why}; give --cp-prefill-constants ALPHA BETA GAMMA, or --cp-prefill auto")
    if constants and len(constants) != 3:
        given = " ".join(f"{x:g}" for x in constants)
        raise UsageError(f"--cp-prefill-constants {given}: give three numbers, alpha, beta and gamma")
    if flags.cluster:
        load_cluster(flags.cluster)


def with_limits(args: Arguments, flags: TimeLimits) -> Arguments:
    """The arguments of a model with the time limits of the flags."""
    return replace(
        args,
        distributed_timeout_minutes=flags.distributed_timeout_minutes,
        distributed_timeout_seconds_after_init=flags.distributed_timeout_seconds_after_init,
    )


INSTEAD = {  # of the trainer's flags
    "--cp-strategy": "inference has plans of its own, for checkpoints of every strategy; give --cp-prefill or nothing",
    "--context-parallel-size": "all ranks share the sequences, but for --tensor-model-parallel-size; leave it out",
}


class Prompts(FlagSection, title="prompts"):
    prompt: list[str] | None = flag("prompts to complete", excludes="prompts_file interactive", example="def read")
    prompts_file: str | None = flag("file with one prompt per line", unit="FILE", excludes="interactive")
    interactive: bool = flag("read the turns of a conversation from the terminal, until Ctrl-D", False)


class Sampling(FlagSection, title="sampling"):
    max_new_tokens: int = flag("maximum new tokens of a text", 128)
    temperature: float = flag("divisor of the logits; 0 selects the most likely token", 1.0, at_least=0)
    top_k: int = flag("sample from the K most likely tokens; 1: greedy; 0: all tokens", 0, at_least=0)
    top_p: float = flag(
        "sample from the fewest tokens that add up to this probability; 0: all", 0.0, at_least=0, at_most=1
    )
    seed: int = flag("random seed; prompt i, from 0, uses this seed + i", 0, at_least=0)
    stop: list[str] | None = flag("strings at which a text stops; they are not part of the text")
    logprobs: bool = flag("print the tokens of each text with their log-probabilities", False)


class Http(FlagSection, title="server"):
    host: str = flag("address to listen on; 0.0.0.0: all of this machine, then set keys", "127.0.0.1")
    port: int = flag("port to listen on; 0: any free port", 5000, at_least=0, at_most=65535)
    api_key_file: str | None = flag(
        "file with one API key per line; a client needs one of them",
        derived="$API_KEYS, separated by commas",
        unit="FILE",
    )
    allowed_hosts: list[str] | None = flag(
        "host names that clients may use, besides addresses, localhost and this machine's name; *: any",
        unit="NAME",
        example="llm.example.org",
    )
    served_model_name: str | None = flag("model name in the API", derived="the last part of --load", unit="NAME")
    max_model_len: int | None = flag(
        "maximum tokens of a request, prompt and text together", derived="the positions of the model", example=4096
    )
    max_new_tokens: int = flag("default maximum tokens of a chat answer", 1024)
    inference_max_requests: int = flag("maximum number of texts that run or wait; further requests get status 429", 256)
    max_body_bytes: int = flag("maximum bytes of an HTTP request", 1 << 24)
    limit_concurrency: int = flag("maximum number of connections; further ones get status 503", 512, at_least=1)
    timeout_keep_alive: int = flag("seconds to keep an idle connection open", 5, at_least=1)
    timeout_client: int = flag("seconds for a client to send a request, and to receive a response", 60, at_least=1)
    timeout_graceful_shutdown: int = flag("seconds after SIGTERM for running texts to finish", 20, at_least=0)
    dry_run: bool = flag("print the number of cached tokens that fit into this machine's memory, and exit", False)


class Handoff(FlagSection, title="decoders of other programs"):
    handoff_host: str | None = flag(
        "address at which each rank serves its keys and values to decoders such as vLLM; 0.0.0.0: all of its machine",
        derived="prefilled sequences are not handed over",
        example="127.0.0.1",
    )
    handoff_port: int = flag(
        "port of the first rank of a machine, the next ranks take the next ports; 0: any free ports",
        0,
        at_least=0,
        at_most=65535,
        needs="handoff_host",
    )
    handoff_seconds: int = flag(
        "how long a prefilled sequence stays in the cache after the last sign of its decoder",
        120,
        at_least=1,
        needs="handoff_host",
    )


class Generate(Source, Prompts, Sampling, CacheFlags, TimeLimits):
    """The flags of tools/generate.py."""


class Serve(Source, Http, Handoff, CacheFlags, TimeLimits):
    """The flags of tools/run_text_generation_server.py."""
