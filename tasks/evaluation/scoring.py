"""Exact match and F1 as HotpotQA's official evaluation script defines them, and answer extraction.

Source: `hotpot_evaluate_v1.py` of https://github.com/hotpotqa/hotpot (Yang et al. 2018), which is
SQuAD's scorer and one rule more: where either side is yes, no or noanswer, F1 is all or nothing.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = ("yes", "no", "noanswer")
_OPEN_TAG, _CLOSE_TAG = "<answer>", "</answer>"
_PAIR = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def normalise(text: str) -> str:
    """Lower case, ASCII punctuation deleted, then articles, then white space collapsed.

    No more than that: no case folding, no NFKC, no accents; those would be other scores.
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, golds: Sequence[str]) -> bool:
    """Whether the prediction equals one of the golds after normalisation.

    Raises:
        ValueError: no golds.
    """
    _need(golds)
    return normalise(prediction) in {normalise(gold) for gold in golds}


def f1(prediction: str, golds: Sequence[str]) -> float:
    """Best F1 over the golds of the normalised bags of words, in [0, 1].

    Two empty bags score 0, as in the official script (their exact match is True).

    Raises:
        ValueError: no golds.
    """
    _need(golds)
    return max(_f1(normalise(prediction), normalise(gold)) for gold in golds)


def extract_answer(sampled_text: str) -> str | None:
    """The answer in what the policy sampled (never the prompt or observations): of the last closed
    `<answer>...</answer>` pair the text from the nearest opening tag, stripped; None without one.

    Tags are lower-case. An empty pair is an answer: the empty text.
    """
    opening = sampled_text.rfind(_OPEN_TAG, 0, max(sampled_text.rfind(_CLOSE_TAG), 0))
    if opening < 0:
        return None
    start = opening + len(_OPEN_TAG)
    return sampled_text[start : sampled_text.index(_CLOSE_TAG, start)].strip()


def search_r1_answer(whole_text: str) -> str | None:
    """The answer as Search-R1's own scorer finds it, for comparison with published runs only.

    Source: `extract_solution` in verl/utils/reward_score/qa_em.py of
    https://github.com/PeterGriffinJin/Search-R1 (Jin et al. 2025). It reads the whole trajectory,
    prompt and observations included, and takes the last pair of tags; a single pair it takes for
    the prompt's example. So an answer may come from a retrieved passage, and with Search-R1's own
    instruction (whose text holds two pairs) who never answers has answered its example, "Beijing".
    Of nested tags it takes all that follows the first opening one.

    Args:
        whole_text: prompt, sampled and observed text in their order.
    """
    pairs = _PAIR.findall(whole_text)
    return pairs[-1].strip() if len(pairs) > 1 else None


def search_r1_exact_match(whole_text: str, golds: Sequence[str]) -> bool:
    """Exact match as Search-R1 counts it: its own extraction, then the same normalisation.

    Raises:
        ValueError: no golds.
    """
    answer = search_r1_answer(whole_text)
    _need(golds)
    return answer is not None and exact_match(answer, golds)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _CLOSED or gold in _CLOSED):
        return 0.0
    found, wanted = prediction.split(), gold.split()
    common = sum((Counter(found) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _need(golds: Sequence[str]) -> None:
    if isinstance(golds, str) or not golds:
        raise ValueError(f"golds is {golds!r}, expected a sequence of at least one answer")
