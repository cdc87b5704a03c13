"""Presets, overrides, and what is refused before anything starts."""

import json
import pickle
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from tasks import presets
from tasks.config import TrainConfig
from tasks.errors import ConfigError
from tasks.presets import Overrides, preset_names, resolve

pytestmark = pytest.mark.fast

SLURM = {"memory": "8G", "walltime": "1:00:00"}
PODS = {"image": "kindling", "secret": "store", "memory": "8Gi"}

# What JSON schema says of a field, default and title aside: bounds, pattern, choices, help.
Said = dict[str, Any]


def _leaves(model: type[BaseModel]) -> dict[str, Said]:
    """Dotted name -> what the form shows of it, with null taken out of its choices."""
    schema = model.model_json_schema()
    return dict(_walk(schema, schema["$defs"], ""))


def _walk(schema: Said, definitions: dict[str, Said], prefix: str) -> Iterator[tuple[str, Said]]:
    for name, field in schema["properties"].items():
        kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
        assert len(kinds) == 1, name
        said = {**field, **kinds[0]}
        said.pop("anyOf", None)
        reference = said.get("$ref")
        if reference:
            yield from _walk(definitions[reference.split("/")[-1]], definitions, f"{prefix}{name}.")
        else:
            yield prefix + name, {k: v for k, v in said.items() if k not in ("default", "title")}


def test_every_preset_resolves() -> None:
    names = preset_names()
    assert "tiny" in names
    for name in names:
        resolved = resolve(name)
        assert isinstance(resolved, TrainConfig)
        assert TrainConfig.model_validate(json.loads(resolved.model_dump_json())) == resolved
        assert pickle.loads(pickle.dumps(resolved)) == resolved  # noqa: S301


def test_no_demonstrations_are_no_warm_start() -> None:
    assert resolve("smollm2").model.warm_start is not None
    off = {"model": {"warm_start": {"demonstrations": 0}}}
    for overrides in (off, Overrides.model_validate(off)):
        assert resolve("smollm2", overrides).model.warm_start is None


def test_every_field_has_help() -> None:
    for name, said in _leaves(TrainConfig).items():
        assert said.get("description", "").strip(), name


def test_overrides_are_the_same_fields_all_optional() -> None:
    assert _leaves(Overrides) == _leaves(TrainConfig)
    empty = Overrides()
    assert empty.model_dump(exclude_none=True) == {}
    sections = [name for name, field in Overrides.model_fields.items() if name != "seed"]
    assert sections == [name for name in TrainConfig.model_fields if name != "seed"]
    for name in sections:
        twin = get_args(Overrides.model_fields[name].annotation)[0]
        assert twin().model_dump(exclude_none=True) == {}
        section = TrainConfig.model_fields[name].annotation
        assert isinstance(section, type)
        assert list(twin.model_fields) == list(section.model_fields)


def _bounds() -> list[tuple[str, Any]]:
    """Every bounded field with a value just outside each of its bounds."""
    outside: list[tuple[str, Any]] = []
    for name, said in _leaves(TrainConfig).items():
        step = 1 if said.get("type") == "integer" else 1e-3
        for key, value in (
            ("minimum", lambda bound, step=step: bound - step),
            ("maximum", lambda bound, step=step: bound + step),
            ("exclusiveMinimum", lambda bound: bound),
            ("exclusiveMaximum", lambda bound: bound),
        ):
            if key in said:
                outside.append((name, value(said[key])))
        if said.get("minLength"):
            outside.append((name, ""))
        if "enum" in said:
            outside.append((name, "none of them"))
        if "pattern" in said:
            outside.append((name, "Not A Bucket"))
    return outside


def _nested(name: str, value: Any) -> dict[str, Any]:
    tree: Any = value
    for part in reversed(name.split(".")):
        tree = {part: tree}
    return tree


@pytest.mark.parametrize(("name", "value"), _bounds())
def test_out_of_range_is_refused_by_both(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("tiny", _nested(name, value))
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    with pytest.raises(ValidationError):
        Overrides.model_validate(_nested(name, value))


def test_there_are_bounds_to_test() -> None:
    assert len(_bounds()) > 50


def test_unknown_preset() -> None:
    for name in ("nope", "", "../presets/tiny", "tiny.toml"):
        with pytest.raises(ConfigError, match="does not exist") as caught:
            resolve(name)
        assert "'tiny'" in str(caught.value)
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [{"nope": 1}, {"training": {"nope": 1}}, {"rollout": {"top_k": 3}}, {"training": {"": 1}}],
)
def test_unknown_field(overrides: dict[str, Any]) -> None:
    ((section, inner),) = overrides.items()
    name = f"{section}.{next(iter(inner))}" if isinstance(inner, dict) else section
    with pytest.raises(ConfigError, match=name):
        resolve("tiny", overrides)
    with pytest.raises(ValidationError):
        Overrides.model_validate(overrides)


@pytest.mark.parametrize(
    "overrides",
    [{"training": 3}, {"training": {"steps": "many"}}, {"seed": 1.5}, {"model": {"chat": "maybe"}}],
)
def test_wrong_type(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(overrides))):
        resolve("tiny", overrides)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            {"model": {"context": 128}, "rollout": {"max_prompt_tokens": 128}},
            ["rollout.max_prompt_tokens is 128", "model.context 128"],
        ),
        (
            {"model": {"context": 512}, "training": {"tokens_per_micro_batch": 511}},
            ["training.tokens_per_micro_batch is 511", "model.context 512"],
        ),
        (
            {
                "rollout": {"questions_per_step": 3, "group_size": 4},
                "training": {"mini_batch_size": 13},
            },
            ["training.mini_batch_size is 13", "12 trajectories"],
        ),
        ({"model": {"instruction": "Answer."}}, ["'Answer.'", "{question} exactly once"]),
        ({"model": {"instruction": "{question} {question}"}}, ["exactly once"]),
    ],
)
def test_fields_at_odds_with_each_other(overrides: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("tiny", overrides)
    for part in parts:
        assert part in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("tiny", {"training": {"steps": 0, "beta1": 1}, "retrieval": {"b": 2}})
    for name in ("training.steps", "training.beta1", "retrieval.b"):
        assert name in str(caught.value)


def test_resolve_merges_and_leaves_the_rest() -> None:
    base = resolve("tiny")
    changes = {"seed": 7, "training": {"steps": 3}, "model": {"chat": not base.model.chat}}
    for overrides in (changes, Overrides.model_validate(changes)):
        merged = resolve("tiny", overrides)
        assert merged.seed == 7
        assert merged.training == base.training.model_copy(update={"steps": 3})
        assert merged.model == base.model.model_copy(update={"chat": not base.model.chat})
        assert merged.rollout == base.rollout
    for nothing in (None, {}, Overrides()):
        assert resolve("tiny", nothing) == base
    # False and 0 are values, not absences.
    assert resolve("tiny", Overrides.model_validate({"training": {"weight_decay": 0}}))
    assert resolve("tiny", Overrides.model_validate({"model": {"chat": False}})).model.chat is False


def test_configurations_do_not_change() -> None:
    with pytest.raises(ValidationError):
        resolve("tiny").training.steps = 5  # type: ignore[misc]


def test_a_preset_with_an_unknown_field_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = (presets.PRESETS / "tiny.toml").read_text()
    (tmp_path / "odd.toml").write_text(tiny + "\n[surprise]\nx = 1\n")
    monkeypatch.setattr(presets, "PRESETS", tmp_path)
    assert preset_names() == ["odd"]
    with pytest.raises(ConfigError, match="surprise"):
        resolve("odd")


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"rollout_workers": 3, "rollout_workers_most": 2}, "most is 2, less than"),
        ({"rollout_workers_most": 4, "scheduler": "tcp://a:1"}, "would not find them"),
        ({"rollout_workers_most": 4, "scheduler": "tls://10.0.0.1:1"}, "would not find them"),
        ({"slurm": SLURM}, "scheduler is not: workers on other machines"),
        ({"slurm": SLURM, "scheduler": "tcp://a:1"}, "store_endpoint is not"),
        ({"kubernetes": PODS, "slurm": SLURM}, "both set"),
        ({"slurm": {**SLURM, "walltime": "a day"}}, "cluster.slurm.walltime"),
        ({"kubernetes": {**PODS, "memory": "much"}}, "cluster.kubernetes.memory"),
    ],
)
def test_a_cluster_that_cannot_be_so_is_refused(cluster: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve("tiny", {"cluster": cluster})


def test_a_run_may_grow_beside_a_scheduler_of_its_own_machine() -> None:
    """As each run of a sweep does, which is told where the sweep's scheduler is."""
    grows = {"rollout_workers_most": 2, "scheduler": "tcp://127.0.0.1:41234"}
    assert resolve("tiny", {"cluster": grows}).cluster.grows
