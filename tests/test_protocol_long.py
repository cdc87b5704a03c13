"""The search protocol over all real questions and passages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.training.tiny_policy import build_tokenizer
from tests.test_protocol import check_ids
from tests.tokenizer_helpers import load_qwen

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_all_real_text_has_the_ids_that_the_tokenizer_gives_it(tmp_path: Path) -> None:
    for tokenizer in (build_tokenizer(), load_qwen(tmp_path)):
        check_ids(tokenizer, every=1)
