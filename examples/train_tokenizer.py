"""Train a small SentencePiece tokenizer (byte pairs) on text: python examples/train_tokenizer.py OUT.model INPUT...

INPUT is files and folders, as tools/preprocess_data.py reads them. Tokens decode to the original text: spaces
and line ends are kept, and characters that were never seen become bytes.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import sentencepiece

from megatron.context_parallel.trainer.data.documents import TEXT_KEY, find_files, read_documents, texts_of

PIECES = 2048
MOST_LINES = 500_000  # the first ones


def lines(inputs: list[str]) -> Iterator[str]:
    """The lines of all documents, with their ends."""
    for document in read_documents(find_files(inputs), [TEXT_KEY]):
        texts = texts_of(document, [TEXT_KEY])
        if not isinstance(texts, str):
            yield from texts[TEXT_KEY].splitlines(keepends=True)


def train(inputs: list[str], output: Path) -> None:
    """Write a tokenizer of at most `PIECES` pieces to `output`."""
    some = [*islice(lines(inputs), MOST_LINES)]  # SentencePiece would hide an error of the generator in its own
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(some),
            model_writer=model,
            model_type="bpe",
            vocab_size=PIECES,
            hard_vocab_limit=False,  # a short text has fewer pieces
            max_sentence_length=1 << 20,
            # Text is code too: nothing is normalized, indentation is one piece, a line end another.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            split_digits=True,
            byte_fallback=True,
            bos_id=-1,
            minloglevel=2,
        )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(output)).get_piece_size()
    print(f"wrote {output}: {pieces} pieces")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    train(sys.argv[2:], Path(sys.argv[1]))
