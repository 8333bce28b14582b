"""The flags of the programs that generate text."""

from dataclasses import replace

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.choose import CHOICES
from megatron.context_parallel.trainer.config.flags import Arguments


class Source(FlagSection, title="model"):
    load: str = flag(
        "a directory of checkpoints of the trainer, or a folder of HuggingFace: Llama, Mistral or Qwen3 in safetensors",
        unit="DIR",
        example="runs/quickstart",
    )
    ckpt_step: int | None = flag("iteration to load", derived="the latest", at_least=0, example=100)
    load_fallback: bool = flag("load the newest complete checkpoint where the one to load is not", False)
    tensor_model_parallel_size: int = flag("ranks that split every layer; the others share the sequences", 1)
    bf16: bool = flag("compute in bfloat16, whatever the dtype of the weights is", False)


class CacheFlags(FlagSection, title="cache"):
    cache_tokens: int | None = flag(
        "tokens whose keys and values all ranks together keep", derived="the positions of the model", example=8192
    )
    cp_prefill: str = flag("what travels in a prefill: keys and values, or queries", "auto", choices=CHOICES)
    cluster: str | None = flag(
        "a cluster whose rates --cp-prefill decides by: a preset or a file",
        unit="NAME",
        derived="auto counts bytes",
        example="dgx-h100",
    )
    cp_prefill_constants: list[float] | None = flag(
        "alpha, beta and gamma of the formula, fitted to measured times",
        needs="cp_prefill=empirical",
        read=float,
        example=1.0,
    )
    inference_dynamic_batching_max_tokens: int = flag("most tokens of prompts in one step", 512)


class TimeLimits(FlagSection, title="time limits"):
    distributed_timeout_minutes: int = flag("a rank that waits longer fails", 10, unit="MINUTES")
    distributed_timeout_seconds_after_init: int = flag(
        "a rank that does not respond so long ends the job, after the first iteration", 60, unit="SECONDS", at_least=2
    )


def check_prefill(flags: CacheFlags) -> None:
    """Refuse a way to choose without what it needs, before ranks meet.

    Raises:
        UsageError: no cluster or constants where they are needed; a cluster that cannot be read.
    """
    how = f"--cp-prefill {flags.cp_prefill}"
    constants = flags.cp_prefill_constants
    if flags.cp_prefill in ("alg1", "alg5") and not flags.cluster:
        raise UsageError(f"{how}: needs the rates of a cluster; give --cluster dgx-h100, or --cp-prefill auto")
    if flags.cp_prefill == "empirical" and not constants:
        why = "needs constants fitted to your own times: those of the paper contradict its measurements"
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


class Prompts(FlagSection, title="prompts"):
    prompt: list[str] | None = flag("texts to go on from", excludes="prompts_file interactive", example="def read")
    prompts_file: str | None = flag("a file with a prompt on each line", unit="FILE", excludes="interactive")
    interactive: bool = flag("read turns of a conversation from the terminal, until its end (Ctrl-D)", False)


class Sampling(FlagSection, title="sampling"):
    max_new_tokens: int = flag("tokens of a text at most", 128)
    temperature: float = flag("divides the logits; 0: the most likely token", 1.0, at_least=0)
    top_k: int = flag("draw among the most likely tokens; 1: greedy; 0: all", 0, at_least=0)
    top_p: float = flag(
        "draw among the most likely tokens that have this probability; 0: all", 0.0, at_least=0, at_most=1
    )
    seed: int = flag("of what is drawn; prompt i, from 0, has this seed + i", 0, at_least=0)
    stop: list[str] | None = flag("texts before which a text ends")
    logprobs: bool = flag("list the tokens of each text with the logarithms of their probabilities", False)


class Http(FlagSection, title="server"):
    host: str = flag("address to listen at; 0.0.0.0: all of this machine, for which set keys", "127.0.0.1")
    port: int = flag("port to listen at; 0: any free one", 5000, at_least=0, at_most=65535)
    api_key_file: str | None = flag(
        "file with a key on each line; a client needs one of them",
        derived="$API_KEYS, separated by commas",
        unit="FILE",
    )
    allowed_hosts: list[str] | None = flag(
        "names by which clients call the server, besides addresses, localhost and the name of this machine; *: any",
        unit="NAME",
        example="llm.example.org",
    )
    served_model_name: str | None = flag("name that clients give", derived="the last part of --load", unit="NAME")
    max_model_len: int | None = flag(
        "most tokens of a request, prompt and text", derived="the positions of the model", example=4096
    )
    max_new_tokens: int = flag("most tokens of a chat's answer, if the client says nothing of it", 1024)
    inference_max_requests: int = flag("texts that run or wait; more get status 429", 256)
    max_body_bytes: int = flag("bytes of an HTTP request at most", 1 << 24)
    limit_concurrency: int = flag("connections at once; more get status 503", 512, at_least=1)
    timeout_keep_alive: int = flag("seconds that a connection stays open between requests", 5, at_least=1)
    timeout_client: int = flag("seconds for a client to send a request, and to take what is sent to it", 60, at_least=1)
    drain_seconds: int = flag("after SIGTERM, time for the texts that have begun", 20, at_least=0)
    dry_run: bool = flag("print how many tokens fit into the memory of this machine, and stop", False)


class Generate(Source, Prompts, Sampling, CacheFlags, TimeLimits):
    """The flags of tools/generate.py."""


class Serve(Source, Http, CacheFlags, TimeLimits):
    """The flags of tools/run_text_generation_server.py."""
