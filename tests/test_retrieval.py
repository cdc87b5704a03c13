"""BM25 against a brute-force oracle, tokenisation, files and the store."""

import json
import math
import shutil
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data.hotpotqa import load_questions
from tasks.data.questions import Passage, pool
from tasks.errors import DataError, IntegrityError
from tasks.retrieval.bm25 import Index, build, index_key
from tasks.retrieval.stored import fetch_index, is_stored, name_of, store_index
from tasks.retrieval.tokenize import words

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"

pytestmark = pytest.mark.fast

# Few letters, so that words repeat, ties are common and accents come in both encodings.
SMALL_TEXT = st.lists(
    st.sampled_from(["a", "b", "c", "É", "E\u0301", "e", "東京", "Straße", "STRASSE", "-", "x1"]),
    max_size=8,
).map(" ".join)
PASSAGES = st.lists(st.builds(Passage, SMALL_TEXT, SMALL_TEXT), min_size=1, max_size=12)


def oracle(passages: list[Passage], query: str, k1: float, b: float) -> dict[int, float]:
    """Lucene's BM25, from the formula, in float64; passages that share a word with the query."""
    documents = [Counter(words(f"{p.title}\n{p.text}")) for p in passages]
    lengths = [sum(document.values()) for document in documents]
    mean = sum(lengths) / len(lengths)
    scores: dict[int, float] = {}
    for number, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        for word in words(query):
            if not document[word]:
                continue
            n = sum(1 for other in documents if other[word])
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            tf = document[word]
            gain = idf * tf / (tf + k1 * (1 - b + b * length / mean))
            scores[number] = scores.get(number, 0.0) + gain
    return scores


@settings(deadline=None)
@given(PASSAGES, SMALL_TEXT, st.integers(1, 15), st.floats(0.1, 3), st.floats(0, 1))
def test_search_equals_brute_force(
    passages: list[Passage], query: str, k: int, k1: float, b: float
) -> None:
    expected = oracle(passages, query, k1, b)
    (hits,) = build(passages, k1, b).search([query], k)
    assert len(hits) == min(k, len(expected))
    assert len({hit.passage_id for hit in hits}) == len(hits)
    for hit in hits:
        assert hit.score == pytest.approx(expected[hit.passage_id], rel=1e-5)
        assert hit.score > 0
    ranking = [(-hit.score, hit.passage_id) for hit in hits]
    assert ranking == sorted(ranking)
    # Nothing better was left out.
    left = set(expected) - {hit.passage_id for hit in hits}
    if left:
        assert max(expected[i] for i in left) <= hits[-1].score * (1 + 1e-5)


def test_ties_go_by_passage_id_at_the_kth_place_too() -> None:
    for size in (7, 500, 3000):  # below and above the size where blocks narrow the ranking down
        same = [Passage("t", "filler" if i % 3 else "word") for i in range(size)]
        index = build(same, 1.2, 0.75)
        for k in (1, 2, 3, 300, size * 2):
            (hits,) = index.search(["word"], k)
            assert [hit.passage_id for hit in hits] == list(range(0, size, 3))[:k]


def test_a_larger_corpus_is_ranked_as_by_sorting_everything() -> None:
    rng = np.random.default_rng(0)
    vocabulary = [f"w{i}" for i in range(60)]
    passages = [Passage("", " ".join(rng.choice(vocabulary[: 2 + i % 58], 6))) for i in range(2500)]
    index = build(passages, 1.2, 0.75)
    for query in ("w0", "w1 w59", "w58 w57 w0 w0", " ".join(vocabulary)):
        (everything,) = index.search([query], len(passages))
        ranking = [(-hit.score, hit.passage_id) for hit in everything]
        assert ranking == sorted(ranking)
        for k in (1, 3, 100, 256, 257, 1000):
            assert index.search([query], k) == [everything[:k]]


def test_corner_cases() -> None:
    one = build([Passage("Only", "passage here")], 1.2, 0.75)
    assert [len(hits) for hits in one.search(["only", "", "unknown", "?!", "only unknown"], 5)] == [
        1, 0, 0, 0, 1,
    ]  # fmt: skip
    for blank in ([Passage("", "")], [Passage(" ", "\n"), Passage("!", "...")]):
        assert build(blank, 1.2, 0.75).search(["a", ""], 3) == [[], []]
    mixed = build([Passage("", ""), Passage("a", "")], 1.2, 0.75)
    assert [hit.passage_id for hit in mixed.search(["a"], 3)[0]] == [1]
    assert one.search([], 3) == []
    with pytest.raises(ValueError, match="k is 0"):
        one.search(["a"], 0)
    with pytest.raises(IndexError, match="passage 1"):
        one.passage(1)
    with pytest.raises(IndexError):
        one.passage(-1)
    with pytest.raises(DataError, match="at least one"):
        build([], 1.2, 0.75)
    with pytest.raises(DataError, match="passage 1"):
        build([Passage("a", "b"), Passage("c", "\ud800")], 1.2, 0.75)
    for k1, b in ((0, 0.5), (-1, 0.5), (1, 1.5), (float("nan"), 0.5), (1, float("nan"))):
        with pytest.raises(ValueError, match="expected k1"):
            build([Passage("a", "b")], k1, b)


def test_order_of_words_does_not_matter_and_repeats_count() -> None:
    index = build([Passage("", "a b"), Passage("", "b b c"), Passage("", "c d")], 1.2, 0.75)
    assert index.search(["a b c"], 3) == index.search(["C, b; A"], 3)
    once, twice = index.search(["d", "d d"], 1)
    assert twice[0].score == pytest.approx(2 * once[0].score)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Beyonce\u0301 BEYONCÉ beyonce", ["beyonce"] * 3),
        ("Plan B, vitamin C & U.S.", ["plan", "b", "vitamin", "c", "u", "s"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("ＡＢＣ ﬁlm ½ Ⅷ", ["abc", "film", "1", "2", "viii"]),
        ("O'Neill snake_case", ["o", "neill", "snake", "case"]),
        ("co\u00adoperate zero\u200bwidth", ["cooperate", "zero", "width"]),
        ("東京tower 1945年", ["東", "京", "tower", "1945", "年"]),
        ("한국어 사람", ["한국어", "사람"]),
        ("Ελλάδα ёж", ["ελλαδα", "еж"]),
        (" \t\n-…", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text())
def test_words_do_not_depend_on_the_encoding_of_accents(text: str) -> None:
    found = words(text)
    assert words(unicodedata.normalize("NFD", text)) == found
    assert words(unicodedata.normalize("NFC", text)) == found
    assert words(unicodedata.normalize("NFKC", text)) == found
    assert all(word and word == word.strip() for word in found)
    assert words(" ".join(found)) == found


@given(st.text(st.characters(max_codepoint=127)))
def test_the_short_cut_for_ascii_changes_nothing(text: str) -> None:
    assert words(text) == words(f"{text} é")[:-1]


def test_files_bring_the_same_index_back(tmp_path: Path) -> None:
    passages = [
        Passage("É", "ein Satz\nund noch einer"),
        Passage("", ""),
        Passage("東京", "a \u0000 b"),
    ]
    index = build(passages, 0.9, 0.4)
    index.save(tmp_path)
    for mmap in (True, False):
        loaded = Index.load(tmp_path, mmap=mmap)
        assert (loaded.key, loaded.k1, loaded.b, len(loaded)) == (index.key, 0.9, 0.4, 3)
        assert [loaded.passage(i) for i in range(3)] == passages
        queries = ["satz e", "a", "京", "nothing"]
        assert loaded.search(queries, 3) == index.search(queries, 3)
        assert isinstance(loaded._bm25.scores["data"], np.memmap) is mmap
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy", ".json", ".arrow"}


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    build([Passage("a", "b c"), Passage("d", "e")], 1.2, 0.75).save(tmp_path / "good")
    for name in sorted(path.name for path in (tmp_path / "good").iterdir()):
        for damage in ("gone", "short", "swapped"):
            bad = tmp_path / f"{name}-{damage}"
            shutil.copytree(tmp_path / "good", bad)
            if damage == "gone":
                (bad / name).unlink()
            elif damage == "short":
                (bad / name).write_bytes((bad / name).read_bytes()[:20])
            elif name.endswith(".npy"):
                # Loading must not unpickle: this array cannot be read without it.
                np.save(bad / name, np.array([{}], object), allow_pickle=True)
            else:
                (bad / name).write_text("[]")
            with pytest.raises(IntegrityError):
                Index.load(bad)


def test_files_are_the_same_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from tasks.retrieval.bm25 import build; "
        "from tasks.data.questions import Passage; "
        "build([Passage('one two', 'three'), Passage('four', 'two é')], 1.2, .75).save(sys.argv[1])"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)],
            check=True, cwd=ROOT, env={"PYTHONHASHSEED": seed},
        )  # fmt: skip
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


def test_the_key_covers_what_matters() -> None:
    base = [Passage("ab", "c"), Passage("d", "e")]
    keys = {
        index_key(base, 1.2, 0.75),
        index_key(base[::-1], 1.2, 0.75),
        index_key([Passage("a", "bc"), base[1]], 1.2, 0.75),
        index_key(base[:1], 1.2, 0.75),
        index_key(base, 1.3, 0.75),
        index_key(base, 1.2, 0.7),
    }
    assert len(keys) == 6
    assert index_key(tuple(base), 1, 0) == index_key(base, 1.0, 0.0)


class MemoryStore:
    """The part of ObjectStore that indexes need, in memory."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.reads = 0

    def exists(self, key: str, /) -> bool:
        return key in self.data

    def get(self, key: str, /) -> bytes:
        self.reads += 1
        return self.data[key]

    def create_if_absent(self, key: str, data: bytes, /) -> bool:
        return self.data.setdefault(key, data) is data

    def create_object(self, data: bytes, /) -> str:
        digest = blake3(data).hexdigest()
        self.data[digest] = data
        return digest

    def get_object(self, digest: str, /) -> bytes:
        return self.get(digest)


def test_store_and_fetch(tmp_path: Path) -> None:
    store = MemoryStore()
    index = build([Passage("a", "b"), Passage("c", "b")], 1.2, 0.75)
    assert not is_stored(store, index.key)
    assert store_index(store, index) == index.key
    assert is_stored(store, index.key)
    objects = len(store.data)
    store_index(store, index)
    assert len(store.data) == objects

    fetched = fetch_index(store, index.key, tmp_path)
    assert fetched.search(["b", "c"], 2) == index.search(["b", "c"], 2)
    reads = store.reads
    fetch_index(store, index.key, tmp_path)
    assert store.reads == reads
    assert [path.name for path in tmp_path.iterdir()] == [index.key]


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    key = store_index(store, build([Passage("a", "b")], 1.2, 0.75))
    description = json.loads(store.data[name_of(key)])
    del store.data[description["files"]["passages.arrow"]["digest"]]
    with pytest.raises(KeyError):
        fetch_index(store, key, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "a/b", "/etc/x", "..", ""])
def test_file_names_from_the_store_are_not_trusted(tmp_path: Path, name: str) -> None:
    store = MemoryStore()
    store.data[name_of("k")] = json.dumps(
        {"format": 1, "key": "k", "files": {name: {"digest": "d"}}}
    ).encode()
    with pytest.raises(IntegrityError, match="plain name"):
        fetch_index(store, "k", tmp_path)
    for damaged in (b"", b"[]", b"{}", b'{"format": 1, "key": "other", "files": {}}'):
        store.data[name_of("k")] = damaged
        with pytest.raises(IntegrityError):
            fetch_index(store, "k", tmp_path)


def test_real_passages_are_found() -> None:
    path = SHARED / "hotpotqa_dev.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    questions = load_questions(str(path))[:150]
    index = build(pool(questions), 1.2, 0.75)
    found = 0
    for question, hits in zip(
        questions, index.search([q.question for q in questions], 10), strict=True
    ):
        titles = {index.passage(hit.passage_id).title for hit in hits}
        found += bool(titles & set(question.gold_titles))
    assert found / len(questions) > 0.9
