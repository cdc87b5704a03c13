"""A look inside a run's versions: rows, the limit, verification, and the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from infra.local import store_alone
from infra.object_store import read_credentials, start_store
from infra.processes import ROOT, ProcessGroup, environment
from tasks import artifacts
from tasks.errors import ConfigError, StoreError
from tasks.store import ObjectStore, object_key
from tasks.weights import look
from tasks.weights.__main__ import app
from tasks.weights.bits import Bits, DtypeName, from_bits, to_bits
from tasks.weights.codec import Change, Range
from tasks.weights.commit import Published, commit, existing_ref, load_manifest
from tasks.weights.compare import changed
from tasks.weights.entropy import exponent_limit
from tasks.weights.history import no_history
from tasks.weights.look import Row
from tasks.weights.manifest import Manifest, ManifestRef, Shard, manifest_key
from tasks.weights.publisher import LocalShard, RankPublisher
from tasks.weights.shards import anchor_files, pack_delta
from tasks.weights.verify import Report, verify
from tests.test_weights_publish import DAMAGES, Damage, data_of, rewrite
from tests.training_helpers import save_tiny_policy
from tests.weights_helpers import (
    Failing,
    Gang,
    Weights,
    memory_store,
    perturbed,
    publish_chain,
    random_weights,
)


@pytest.fixture
def store() -> ObjectStore:
    return memory_store()


def links_of(store: ObjectStore, run: str = "run") -> list[ManifestRef]:
    """Oldest first."""
    return list(_walk(store, run).links)


def rows_of(store: ObjectStore, run: str = "run") -> list[Row]:
    return list(_walk(store, run).rows)


def _walk(store: ObjectStore, run: str) -> look.Walk:
    return look.walk(existing_ref(store, run), lambda ref: load_manifest(store, run, ref))


def manifest_of(store: ObjectStore, version: int) -> Manifest:
    return load_manifest(store, "run", links_of(store)[version])


# Entropy


_WIDTHS: dict[DtypeName, tuple[int, int, int]] = {
    "bfloat16": (16, 7, 0xFF),
    "float16": (16, 10, 0x1F),
    "float32": (32, 23, 0xFF),
}


def brute_limit(pairs: Sequence[tuple[Bits, Change]], dtype: DtypeName) -> float:
    """The formula of `tasks.weights.entropy`, value by value."""
    width, shift, mask = _WIDTHS[dtype]
    top = 1 << (width - 1)

    def rank(bits: int) -> int:
        return 2 * top - 1 - bits if bits & top else bits + top

    values: Counter[int] = Counter()
    hits: Counter[int] = Counter()
    moves: Counter[tuple[int, int]] = Counter()
    for old, change in pairs:
        values.update((bits >> shift) & mask for bits in old.tolist())
        for i, new in zip(change.indices.tolist(), change.values.tolist(), strict=True):
            exponent = (int(old[i]) >> shift) & mask
            hits[exponent] += 1
            moves[exponent, rank(new) - rank(int(old[i]))] += 1
    bits = 0.0
    for exponent, n in values.items():
        for part in (hits[exponent] / n, 1 - hits[exponent] / n):
            bits -= n * part * math.log2(part) if part else 0.0
    return bits - sum(c * math.log2(c / hits[exponent]) for (exponent, _), c in moves.items())


@pytest.mark.fast
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_limit_is_the_conditional_entropy(data: st.DataObject) -> None:
    dtype: DtypeName = data.draw(st.sampled_from(sorted(_WIDTHS)))  # type: ignore[arg-type]
    width = _WIDTHS[dtype][0]
    pattern = np.dtype(f"<u{width // 8}")
    anything = st.integers(0, 2**width - 1)
    common = st.sampled_from([0, 1, 1 << (width - 1), 2**width - 1, 0x3F80, 0x3F81, 0x4000])
    pairs: list[tuple[Bits, Change]] = []
    for _ in range(data.draw(st.integers(0, 3))):
        size = data.draw(st.integers(0, 60))
        old = data.draw(hnp.arrays(pattern, size, elements=st.one_of(common, anything)))
        moved = data.draw(hnp.arrays(pattern, size, elements=st.one_of(st.just(0), common)))
        pairs.append((old, changed(old, old ^ moved)))
    assert exponent_limit(iter(pairs), dtype) == pytest.approx(brute_limit(pairs, dtype), abs=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_codec_without_history_needs_the_limit_and_little_more(dtype: DtypeName) -> None:
    """It knows the exponents alone then, and what it adds are its tables."""
    rng = np.random.default_rng(3)
    wide = rng.normal(0, 0.02, 600_000).astype(np.float32).view("<u4")
    old = (wide >> 16).astype("<u2") if dtype == "bfloat16" else wide
    exponents = (old >> (7 if dtype == "bfloat16" else 23)).astype(np.int64) & 0xFF
    chance = 0.02 * 2.0 ** (121 - exponents)  # the smaller a weight, the likelier and the further
    steps = rng.geometric(np.clip(0.5 * 2.0 ** (exponents - 121), 0.02, 0.9))
    new = np.where(rng.random(old.size) < chance, old + steps, old).astype(old.dtype)
    change = changed(old, new)
    assert change.indices.size > 5000
    limit = exponent_limit([(old, change)], dtype)
    taken = 8 * len(pack_delta([Range("w", 0, dtype, old, no_history(old.size))], [change]))
    assert limit < taken < 1.04 * limit + 8 * 1500


# Rows


@pytest.mark.fast
def test_a_row_says_what_a_version_weighs(store: ObjectStore) -> None:
    gang = Gang(store, "run")
    history = [random_weights(1)]
    published: list[Published] = [gang.publish(history[0], "anchor")]
    for version, kind in enumerate(["delta", "delta", "anchor", "delta"], 1):
        history.append(perturbed(history[-1], version))
        published.append(gang.publish(history[-1], cast(Any, kind)))
    published.append(gang.publish(history[-1], "delta"))  # nothing changed
    rows = rows_of(store)
    assert [row.kind for row in rows] == ["anchor", *["delta"] * 2, "anchor+delta", *["delta"] * 2]
    assert [row.chain for row in rows] == [0, 1, 2, 0, 1, 2]
    sizes = [row.delta_bytes for row in rows]
    assert [row.chain_bytes for row in rows] == [
        0,
        sizes[1],
        sizes[1] + sizes[2],
        0,
        sizes[4],
        sizes[4],
    ]
    moved = [
        sum(int((before[name][2] != after[name][2]).sum()) for name in before)
        for before, after in pairwise(history)
    ]
    assert [row.changed for row in rows] == [None, *moved, 0]
    assert rows[1].bits == 8 * sizes[1] / moved[0]
    assert rows[1].share == moved[0] / sum(bits.size for _, _, bits in history[0].values())
    assert (rows[0].share, rows[0].bits, rows[5].bits, rows[5].delta_bytes) == (None, None, None, 0)
    for row, link in zip(rows, links_of(store), strict=True):
        assert row.manifest_bytes == len(data_of(store)[manifest_key("run", link)])
        assert row.anchor_bytes == sum(f.bytes for f in load_manifest(store, "run", link).anchor)
    # What publishing answered makes the same rows: no read is needed for them.
    assert look.chained([look.row_of_published(one) for one in published]) == rows
    json.dumps([look.as_json(row) for row in rows])
    assert all(" " not in cell for row in rows for cell in look.cells(row, True).values())


@pytest.mark.fast
def test_a_run_resumed_with_other_weights_begins_with_an_anchor_alone(store: ObjectStore) -> None:
    publish_chain(Gang(store, "run"), 2)
    Gang(store, "run", resume=True).publish(random_weights(5), "anchor")
    assert [(row.kind, row.changed, row.chain) for row in rows_of(store)][2] == ("anchor", None, 0)
    assert verify(store, "run").checks == {0: "ok", 1: "ok", 2: "ok"}


@pytest.mark.fast
def test_a_chain_without_its_beginning_is_unknown() -> None:
    row = Row(7, "delta", 10, 0, 5, 3, 100, "")
    assert [(r.chain, r.chain_bytes) for r in look.chained([row])] == [(None, None)]


@pytest.mark.fast
def test_the_artifact_shows_the_last_versions(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = Gang(store, "run")
    weights = random_weights(1)
    published = [gang.publish(weights, "anchor")]
    for version in range(1, 25):
        weights = perturbed(weights, version)
        published.append(gang.publish(weights, "delta"))
    shown: dict[str, Any] = {}
    monkeypatch.setattr(
        artifacts, "create_table_artifact", lambda table, **named: shown.update(named, table=table)
    )
    artifacts.weights("run", published)
    assert shown["key"] == "weights"
    assert [row["version"] for row in shown["table"]] == [str(v) for v in range(5, 25)]
    assert shown["table"][-1]["chain"] == "24"


# Verification


def limit_between(before: Weights, after: Weights) -> float:
    total = 0.0
    for dtype in _WIDTHS:
        names = [name for name, (_, kind, _) in before.items() if kind == dtype]
        pairs = [(before[n][2], changed(before[n][2], after[n][2])) for n in names]
        total += brute_limit(pairs, dtype)
    return total


def assert_clean(report: Report, history: Sequence[Weights]) -> None:
    assert report.faults == ()
    assert report.checks == dict.fromkeys(range(len(history)), "ok")
    assert report.head == len(history) - 1
    limits = [row.limit for row in report.rows]
    assert limits[0] is None
    wanted = [limit_between(*pair) for pair in pairwise(history)]
    assert limits[1:] == pytest.approx(wanted)


@pytest.mark.fast
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_published_whole_is_clean(store: ObjectStore, ranks: int) -> None:
    history = publish_chain(Gang(store, "run", ranks), 7, anchors=(0, 2, 3))
    report = verify(store, "run")
    assert_clean(report, history)
    manifests = [manifest_of(store, version) for version in range(7)]
    objects = [shard for m in manifests for shard in (*m.shards, *m.anchor)]
    assert (report.objects, report.bytes) == (len(objects), sum(one.bytes for one in objects))


@pytest.mark.fast
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_every_damage_is_a_fault(store: ObjectStore, damage: Damage) -> None:
    publish_chain(Gang(store, "run"), 3)
    damage(data_of(store), manifest_of(store, 2))
    report = verify(store, "run")
    assert report.faults
    assert all(fault.what for fault in report.faults)
    assert {fault.version for fault in report.faults} <= {None, 1, 2}
    assert report.checks.get(2) != "ok"


@pytest.mark.fast
def test_all_faults_are_found_and_what_hangs_on_them(store: ObjectStore) -> None:
    publish_chain(Gang(store, "run"), 10, anchors=(0, 4, 8))
    data = data_of(store)

    def spoil(version: int, what: str, number: int = 0) -> None:
        key = object_key(getattr(manifest_of(store, version), what)[number].digest)
        data[key] = data[key][:-1]

    spoil(2, "shards", 0)
    spoil(2, "shards", 1)
    spoil(4, "anchor")
    spoil(6, "shards", 1)
    del data[object_key(manifest_of(store, 9).shards[0].digest)]
    report = verify(store, "run")
    assert [fault.version for fault in report.faults] == [2, 2, 4, 6, 9]
    assert "is missing" in report.faults[-1].what
    assert list(report.checks.items()) == [
        (0, "ok"),
        (1, "ok"),
        (2, "fault"),
        (3, "not-reached"),
        (4, "fault"),  # neither way leads there
        (5, "not-reached"),
        (6, "fault"),
        (7, "not-reached"),
        (8, "ok"),  # by its anchor
        (9, "fault"),
    ]


def _forge_anchor(store: ObjectStore, weights: Weights, said: Weights | None = None) -> None:
    """Gives the head another anchor: whole objects and links, as a faulty publisher writes them."""
    head = manifest_of(store, existing_ref(store, "run").version)
    tensors = {n: from_bits(bits, dtype, shape) for n, (shape, dtype, bits) in weights.items()}
    ((_, data),) = anchor_files(tensors.items())
    digest = blake3(data).hexdigest()
    data_of(store)[object_key(digest)] = data
    names = tuple(said or weights)
    rewrite(
        data_of(store),
        head,
        anchor=(Shard(digest=digest, bytes=len(data), rank=0, tensors=names),),
    )


@pytest.mark.fast
def test_an_anchor_is_checked_beside_its_delta(store: ObjectStore) -> None:
    history = publish_chain(Gang(store, "run"), 4, anchors=(0, 3))
    whole = dict(data_of(store))
    other = perturbed(history[3], 50)
    fewer = {name: one for name, one in history[3].items() if name != "model.scalar"}
    shape, dtype, bits = history[3]["model.half.weight"]
    turned: Weights = {**history[3], "model.half.weight": (shape[::-1], dtype, bits)}
    for wrong, said in ((other, "by its anchor"), (fewer, "other tensors"), (turned, "[9, 7]")):
        _forge_anchor(store, wrong, history[3])
        faults = verify(store, "run").faults
        assert [fault.version for fault in faults] == [3]
        assert said in faults[0].what
        data_of(store).clear()
        data_of(store).update(whole)
    _forge_anchor(store, history[3])
    assert_clean(verify(store, "run"), history)


@pytest.mark.fast
def test_what_a_newcomer_does_not_need_may_be_gone(store: ObjectStore) -> None:
    publish_chain(Gang(store, "run"), 8, anchors=(0, 4))
    data = data_of(store)
    whole = dict(data)
    manifests = [manifest_of(store, version) for version in range(8)]
    links = links_of(store)

    def checks_without(*keys: str) -> str:
        data.clear()
        data.update({key: value for key, value in whole.items() if key not in keys})
        report = verify(store, "run")
        assert bool(report.faults) == ("fault" in report.checks.values())
        return " ".join(report.checks[version] for version in range(8))

    def objects(version: int) -> list[str]:
        return [
            object_key(o.digest) for o in (*manifests[version].shards, *manifests[version].anchor)
        ]

    kept = " ok ok ok ok"
    nothing_old = "not-kept not-kept not-kept not-kept" + kept
    old = [key for version in range(4) for key in objects(version)]
    assert checks_without(*old) == nothing_old
    assert checks_without(*objects(2)) == "ok ok not-kept not-kept" + kept
    assert checks_without(objects(3)[1]) == "ok ok ok not-kept" + kept
    assert checks_without(manifest_key("run", links[1])) == nothing_old
    # From the newest anchor on nothing may be missing.
    assert checks_without(objects(4)[0]) == "ok ok ok ok fault ok ok ok"
    assert checks_without(objects(4)[-1]) == "ok ok ok ok fault ok ok ok"
    assert checks_without(objects(5)[0]).endswith("ok ok fault not-reached not-reached")
    # And what is there must be right, however old.
    data[objects(1)[0]] = b"damaged"
    data.pop(objects(5)[0], None)
    assert {fault.version for fault in verify(store, "run").faults} == {1, 5}


@pytest.mark.fast
def test_an_object_two_versions_name_is_kept_for_the_newer(store: ObjectStore) -> None:
    gang = Gang(store, "run")
    weights = random_weights(1)
    for kind in ("anchor", "delta", "anchor"):
        gang.publish(weights, cast(Any, kind))
    del data_of(store)[object_key(manifest_of(store, 0).anchor[0].digest)]
    report = verify(store, "run")
    assert [fault.version for fault in report.faults] == [2]


@pytest.mark.fast
def test_a_store_that_fails_is_not_a_run_at_fault(store: ObjectStore) -> None:
    publish_chain(Gang(store, "run"), 3)
    with pytest.raises(StoreError, match="injected"):
        verify(cast(ObjectStore, Failing(store, 6, late=False)), "run")


# The command line


def _options(store: ObjectStore) -> list[str]:
    return ["--endpoint", store.location.endpoint, "--bucket", store.location.bucket]


def _call(store: ObjectStore, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, *_options(store)])


def test_log_and_verify_through_s3(object_store: ObjectStore) -> None:
    history = publish_chain(Gang(object_store, "look-s3"), 5, anchors=(0, 3))
    assert_clean(verify(object_store, "look-s3"), history)
    logged = _call(object_store, "log", "look-s3")
    assert logged.exit_code == 0
    header, *lines = logged.stdout.splitlines()
    assert header.split() == list(look.cells(rows_of(object_store, "look-s3")[0]))
    assert [line.split()[1] for line in lines] == [r.kind for r in rows_of(object_store, "look-s3")]
    limited = _call(object_store, "log", "look-s3", "--limit", "--json")
    rows = json.loads(limited.stdout)["versions"]
    assert rows[1]["limit_bits"] == pytest.approx(
        limit_between(history[0], history[1]) / rows[1]["changed"]
    )
    clean = _call(object_store, "verify", "look-s3")
    assert clean.exit_code == 0
    assert "clean: 5 versions right, 0 not kept" in clean.stdout
    head = load_manifest(object_store, "look-s3", existing_ref(object_store, "look-s3"))
    object_store.delete([object_key(head.shards[0].digest)])
    object_store.put(object_key(head.shards[1].digest), b"damaged")
    faulty = _call(object_store, "verify", "look-s3")
    assert faulty.exit_code == 1
    assert faulty.stderr.count("fault: version 4: ") == 2
    found = json.loads(_call(object_store, "verify", "look-s3", "--json").stdout)
    assert [row["check"] for row in found["versions"]] == ["ok"] * 4 + ["fault"]
    assert len(found["faults"]) == 2
    unknown = _call(object_store, "log", "no-such-run")
    assert unknown.exit_code == 1
    assert "look-s3" in unknown.stderr


def test_an_exported_version_loads_in_transformers(
    object_store: ObjectStore, tmp_path: Path
) -> None:
    base = save_tiny_policy(tmp_path / "base")
    run = "look-export"
    shards = [
        LocalShard.from_tensor(n, t) for n, t in load_file(base / "model.safetensors").items()
    ]
    publisher = RankPublisher(object_store, run, rank=0)
    for kind in ("anchor", "delta", "delta"):
        part = publisher.prepare(shards, kind, whole=True)
        publisher.confirm(commit(object_store, run, publisher.next_version, [part]))
        shards = [replace(one, values=one.values ^ np.uint16(1)) for one in shards]
    made = _call(object_store, "export", run, "1", str(tmp_path / "out"), "--model", str(base))
    assert made.exit_code == 0, made.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    held = dict(model.named_parameters())
    for one in shards:  # flipped three times: what version 1 is
        assert np.array_equal(to_bits(held[one.name]), one.values)
    again = _call(object_store, "export", run, "1", str(tmp_path / "out"), "--model", str(base))
    assert again.exit_code == 1
    assert "not empty" in again.stderr
    beyond = _call(object_store, "export", run, "9", str(tmp_path / "no"), "--model", str(base))
    assert beyond.exit_code == 1
    assert "its newest is 2" in beyond.stderr


def test_the_store_of_earlier_runs_is_started_for_a_look(tmp_path: Path) -> None:
    """As a process, after a run whose services have ended."""
    with ProcessGroup(tmp_path / "logs") as group:
        location = start_store(group, tmp_path / "store", "kindling")
        with environment(read_credentials(tmp_path / "store").environment()):
            publish_chain(Gang(ObjectStore(location), "earlier"), 3)
    found = _process(tmp_path, "verify", "earlier", "--json")
    assert found.returncode == 0, found.stderr
    assert [row["check"] for row in json.loads(found.stdout)["versions"]] == ["ok"] * 3


def _process(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tasks.weights", *arguments],
        cwd=ROOT,
        env={**os.environ, "KINDLING_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.fast
def test_without_a_store_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no store"), store_alone(home=tmp_path):
        pass


_PUBLISH_AFTER_COMPILING = """
import sys, tempfile
from numba.core.dispatcher import Dispatcher
from tasks.weights import kernels
from tasks.weights.compile import compile_kernels
from tasks.weights.subscriber import Subscriber
from tests.weights_helpers import Gang, memory_store, publish_chain

def compiled():
    return {(n, s) for n, v in vars(kernels).items() if isinstance(v, Dispatcher)
            for s in v.signatures}

compile_kernels()
before = compiled()
store = memory_store()
publish_chain(Gang(store, "run"), 5, anchors=(0, 3))
with tempfile.TemporaryDirectory() as folder:
    reader = Subscriber(store, folder)
    for version in range(5):
        reader.fetch("run", version)
    reader.close()
new = compiled() - before
sys.exit("; ".join(sorted(map(str, new))) or 0)
"""


def test_a_run_finds_every_kernel_compiled() -> None:
    """In a process of its own: here other tests have compiled everything already."""
    found = subprocess.run(
        [sys.executable, "-c", _PUBLISH_AFTER_COMPILING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
