"""Serve a trained model over HTTP: `torchrun ... tools/run_text_generation_server.py --help`."""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.run_text_generation_server()

import os
import sys
from dataclasses import replace
from pathlib import Path

from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce, ignore_warnings_of_libraries, imports
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.generation.flags import INSTEAD, Serve, check_prefill, with_limits
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.integration.huggingface.config import is_huggingface
from megatron.context_parallel.progress import is_first_rank
from megatron.context_parallel.trainer.faults.lifetime import end_with_parent, sigterm_came

PARSER = FlagParser(
    Serve,
    "Serve OpenAI's completions and chat completions.\nSIGTERM ends the server after the running texts have finished.",
    "--load DIR [flags]",
    ["--load runs/quickstart --dry-run", "--load path/to/Llama-3.1-8B-Instruct --bf16 --port 8000"],
    instead=INSTEAD,
    torchrun=True,
)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UsageError for invalid flags or files."""
    ignore_warnings_of_libraries()
    end_with_parent()
    flags = PARSER.parse(argv)
    check_prefill(flags)
    check_handoff(flags)
    keys = read_keys(flags)
    args = with_limits(model_arguments(flags), flags)
    if flags.dry_run:
        from megatron.context_parallel.generation.cache_size import describe

        describe(args, flags.cache_tokens, flags.kv_cache_dtype)
        return
    announce(f"loading {flags.load} on {args.world_size} ranks")
    # These take seconds to import. Mistakes in flags are reported before.
    with imports():
        from megatron.context_parallel.generation.generator import build_engine
        from megatron.context_parallel.inference.rank_loop import RankLoop
        from megatron.context_parallel.serving.app import Service, Settings
        from megatron.context_parallel.serving.connections import Patience
        from megatron.context_parallel.serving.handoff import serving_rows
        from megatron.context_parallel.serving.hosts import names_of
        from megatron.context_parallel.serving.listen import bind, serve_in_thread
        from megatron.context_parallel.serving.metrics import Metrics
        from megatron.context_parallel.serving.protocol import Limits
        from megatron.context_parallel.serving.reader import reading
        from megatron.context_parallel.serving.worker import Worker
        from megatron.context_parallel.trainer.setup import distributed_job

    with distributed_job(replace(args, exit_signal_handler=True)) as watch:
        engine = build_engine(args, flags, flags.max_model_len)
        announce("computing a first token")
        engine.warm_up()
        loop = RankLoop(engine)
        if args.rank:
            with serving_rows(engine, flags):
                loop.follow()
            return
        name = flags.served_model_name or Path(flags.load).resolve().name
        worker = Worker(loop, flags.inference_max_requests, Metrics(name), watch.silent_ranks)
        hosts = names_of(flags.host, flags.allowed_hosts or ())
        settings = Settings(name, keys, hosts, flags.max_body_bytes, flags.max_new_tokens)
        limits = Limits(name, loop.engine.length, flags.max_body_bytes)
        patience = Patience(flags.limit_concurrency, flags.timeout_keep_alive, flags.timeout_client)
        listener = bind(flags.host, flags.port)
        with (
            reading(loop.engine.tokenizer, limits) as readers,
            serving_rows(engine, flags, worker) as tickets,
            serve_in_thread(Service(worker, settings, readers, tickets).app(), listener, patience) as stop,
        ):

            def end_texts() -> None:
                worker.fail()
                stop()

            watch.before_end = end_texts
            address, port = listener.getsockname()[:2]
            place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            print(f"listening at http://{place}, model {name}", flush=True)
            worker.run(sigterm_came, flags.timeout_graceful_shutdown)
        print("stopped", flush=True)  # behind the log lines of the last answers


def check_handoff(flags: Serve) -> None:
    """Raises UsageError if the model is not one that a decoder can have too, or its cache not one that it reads."""
    if flags.handoff_host and flags.kv_cache_dtype != "auto":
        why = "decoders take keys and values in the dtype of the model"
        raise UsageError(f"--kv-cache-dtype {flags.kv_cache_dtype}: {why}; give auto, or leave out --handoff-host")
    if flags.handoff_host and not is_huggingface(flags.load):
        why = "decoders compare their weights with those of a HuggingFace folder"
        raise UsageError(f"--handoff-host {flags.handoff_host}: {why}; convert {flags.load} with tools/convert_hf.py")


def read_keys(flags: Serve) -> tuple[str, ...]:
    """The accepted API keys."""
    text, source = os.environ.get("API_KEYS", "").replace(",", "\n"), "API_KEYS"
    if flags.api_key_file is not None:
        source = f"--api-key-file {flags.api_key_file or repr('')}"
        try:
            text = Path(flags.api_key_file).read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"{source}: cannot be read ({error}); give a file with one key per line") from None
    keys = tuple(key for line in text.splitlines() if (key := line.strip()))
    if not keys and flags.api_key_file is not None:
        raise UsageError(f"{source}: contains no key; write one per line")
    if not keys and "API_KEYS" in os.environ:
        raise UsageError("API_KEYS: contains no key; write keys separated by commas, or unset it to serve everyone")
    if any(not key.isascii() or " " in key for key in keys):
        raise UsageError(f"{source}: a key contains a space or a non-ASCII character; write keys without them")
    if flags.host not in _LOOPBACK and not keys and is_first_rank():
        print(
            f"warning: --host {flags.host}: everyone who can reach it may use it; give --api-key-file", file=sys.stderr
        )
    return keys
