"""Generate text with a trained model on all ranks: `torchrun ... tools/generate.py --help`."""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.generate()

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce, ignore_warnings_of_libraries, imports
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.generation.flags import INSTEAD, Generate, check_prefill, with_limits
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.trainer.faults.lifetime import end_with_parent

if TYPE_CHECKING:
    from megatron.context_parallel.inference.engine import Engine
    from megatron.context_parallel.inference.rank_loop import RankLoop
    from megatron.context_parallel.inference.request import Request, RequestOutput

PARSER = FlagParser(
    Generate,
    "Generate text with a trained model.",
    '--load DIR --prompt "def read" [flags]',
    [
        '--load runs/quickstart --prompt "def read" --max-new-tokens 64',
        "--load path/to/Llama-3.1-8B-Instruct --bf16 --interactive",
    ],
    instead=INSTEAD,
    torchrun=True,
)


def main(argv: list[str] | None = None) -> None:
    """Generate text and print it as it is generated. Raises UsageError for invalid flags or files."""
    ignore_warnings_of_libraries()
    end_with_parent()
    flags = read_flags(argv)
    prompts = read_prompts(flags)
    args = with_limits(model_arguments(flags), flags)
    announce(f"loading {flags.load} on {args.world_size} ranks")
    # These take seconds to import. Mistakes in flags are reported before.
    with imports():
        from megatron.context_parallel.generation.generator import build_engine
        from megatron.context_parallel.inference.rank_loop import RankLoop
        from megatron.context_parallel.trainer.setup import distributed_job

    with distributed_job(args):
        engine = build_engine(args, flags)
        requests = requests_of(flags, engine, prompts)
        loop = RankLoop(engine)
        if args.rank:
            loop.follow()
            return
        if flags.interactive:
            converse(flags, loop)
        else:
            write_all(flags, loop, prompts, requests)
        loop.end()


def read_flags(argv: list[str] | None) -> Generate:
    """The flags, with the checks that need no files."""
    flags = PARSER.parse(argv)
    check_prefill(flags)
    if not (flags.prompt or flags.prompts_file or flags.interactive):
        raise UsageError('--prompt: missing; give --prompt "def read", --prompts-file FILE or --interactive')
    return flags


def read_prompts(flags: Generate) -> list[str]:
    """The prompts on the command line or in the file, without line ends and empty lines."""
    if not flags.prompts_file:
        return flags.prompt or []
    try:
        lines = Path(flags.prompts_file).read_text().split("\n")  # prompts may have form feeds and U+2028
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts-file {flags.prompts_file}: cannot be read ({error}); give a text file") from None
    if not (prompts := [line for line in lines if line]):
        raise UsageError(f"--prompts-file {flags.prompts_file}: contains no prompts; write one per line")
    return prompts


def requests_of(flags: Generate, engine: "Engine", prompts: Sequence[str]) -> "list[Request]":
    """A request for each prompt, after a check that all of them can run."""
    encoded = [engine.tokenizer.encode(prompt) for prompt in prompts]
    for tokens in encoded:
        engine.check(tokens, flags.max_new_tokens)
    return [request_of(flags, str(i), tokens, flags.seed + i) for i, tokens in enumerate(encoded)]


def request_of(flags: Generate, name: str, tokens: list[int], seed: int) -> "Request":
    """The request that the flags describe."""
    from megatron.core.inference.sampling_params import SamplingParams

    from megatron.context_parallel.inference.request import Request

    params = SamplingParams(
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        return_log_probs=flags.logprobs,
        num_tokens_to_generate=flags.max_new_tokens,
        stop_words=flags.stop,
    )
    return Request(name, tokens, params, seed)


def write_all(flags: Generate, loop: "RankLoop", prompts: Sequence[str], requests: "Sequence[Request]") -> None:
    """Print each prompt with its text, in order, as they are generated. Several prompts are numbered."""
    outputs: dict[str, list[RequestOutput]] = {request.name: [] for request in requests}
    coming = in_turn(loop, requests, outputs)
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True), 1):
        if len(prompts) > 1:
            print(f"--- prompt {number} of {len(prompts)}: {prompt!r}")
        print(prompt, end="", flush=True)
        write_text(flags, loop.engine, coming, outputs[request.name])


def write_text(flags: Generate, engine: "Engine", coming: Iterator[None], outputs: "list[RequestOutput]") -> None:
    """Print one text as it is generated; `next(coming)` may append to its outputs."""
    written = 0
    while not (outputs and written == len(outputs) and outputs[-1].finish):
        if written == len(outputs):
            next(coming)
        for output in outputs[written:]:
            print(output.text, end="", flush=True)
        written = len(outputs)
    print()
    if outputs[-1].finish == "error":
        raise UsageError(f"--load {flags.load}: {outputs[-1].why}; check the weights, or leave out --bf16")
    for token in (token for output in outputs if flags.logprobs for token in output.tokens):
        print(f"{token.logprob:10.4f}  {token.id:7}  {engine.tokenizer.decode([token.id])!r}")


def in_turn(
    loop: "RankLoop", requests: "Sequence[Request]", outputs: "dict[str, list[RequestOutput]]"
) -> Iterator[None]:
    """Run a step for each `next`, and append its outputs to `outputs`, by request."""
    arriving = requests
    while True:
        for output in loop.turn(arriving):
            outputs[output.request].append(output)
        arriving = ()
        yield


def converse(flags: Generate, loop: "RankLoop") -> None:
    """Answer typed lines; the conversation stays in the cache.

    With a chat template a line is a message. Without one, the model continues the text so far.
    """
    engine, said, messages = loop.engine, list[int](), list[dict[str, str]]()
    chat = engine.tokenizer.has_chat
    for turn in range(1_000_000):
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        messages.append({"role": "user", "content": line})
        special = False if said else None  # tokens such as BOS come before the first line only
        tokens = engine.tokenizer.chat(messages) if chat else [*said, *engine.tokenizer.encode(line, special)]
        try:
            engine.check(tokens, flags.max_new_tokens)
        except UsageError as error:
            print(f"{error}; the conversation ends here")
            return
        request = request_of(flags, str(turn), tokens, flags.seed + turn)
        outputs: dict[str, list[RequestOutput]] = {request.name: []}
        write_text(flags, engine, in_turn(loop, [request], outputs), outputs[request.name])
        chosen = [token.id for output in outputs[request.name] for token in output.tokens]
        said = [*tokens, *(token for token in chosen if token not in engine.tokenizer.ends)]
        messages.append({"role": "assistant", "content": "".join(output.text for output in outputs[request.name])})
