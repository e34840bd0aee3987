"""A tiny model on disk with a byte-level tokenizer, and the command line run in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from kvcellar.frontends.cli import main
from models import new_llama


def write_model(folder: Path, seed: int = 0) -> Path:
    """A random Llama over 256 byte tokens, saved as a transformers folder."""
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    new_llama(seed, vocab_size=len(letters), max_position_embeddings=2048).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*words: object, stdin: str | None = None) -> Outcome:
    """`kvcellar WORDS…`; an exception that is no clean exit fails the test."""
    result = CliRunner().invoke(main, [str(word) for word in words], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)
