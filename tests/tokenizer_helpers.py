"""Real tokenizers, and their tokens as bytes."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tasks.training.policy import load_tokenizer

QWEN = Path(__file__).resolve().parents[2] / "shared/tokenizers/qwen2.5"
_BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}


def load_qwen(folder: Path) -> Any:
    """Qwen2.5's tokenizer, unpacked into a folder; skips the test where it is absent."""
    if not QWEN.exists():
        pytest.skip(f"{QWEN} is absent")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(QWEN / name, folder)
    (folder / "tokenizer.json").write_bytes(
        gzip.decompress((QWEN / "tokenizer.json.gz").read_bytes())
    )
    return load_tokenizer(folder, chat=True)


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of every token of a byte-level tokenizer; special tokens left out."""
    added = tokenizer.added_tokens_decoder
    return {
        number: token.encode() if number in added else bytes(_BYTES[sign] for sign in token)
        for token, number in tokenizer.get_vocab().items()
        if number not in added or not added[number].special
    }
