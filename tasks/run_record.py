"""What is written down of a run when it begins, and whether it may be gone on with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from tasks.config import TrainConfig
from tasks.errors import ConfigError, StoreConflict
from tasks.inputs import Inputs
from tasks.store import ObjectStore
from tasks.training.provenance import digest_of_model, text_of_questions
from tasks.weights.commit import known_runs

# May differ between a run and its resumption: how long, how often, and on what machines.
FREE_TO_CHANGE = {"cluster", "evaluation"}
FREE_FIELDS = {
    "training": {"steps", "checkpoint_every", "mismatch_alarm"},
    "rollout": {"max_failed_rewards", "reward_timeout_s"},
    # A retriever may have moved; none in place of one, or the reverse, is another corpus.
    "retrieval": {"url", "time_limit_s", "attempts"},
}
# What of those sections an evaluated trajectory does not depend on.
_OF_NO_TRAJECTORY = {
    *("model.path", "model.warm_start"),
    *("rollout.questions_per_step", "rollout.group_size", "rollout.max_sequences"),
    *("rollout.kv_cache_gib", "rollout.deterministic", "rollout.reward", "rollout.format_bonus"),
}


def record_key(run: str) -> str:
    return f"runs/{run}/run.json"


def recorded(store: ObjectStore, name: str) -> dict[str, Any] | None:
    """What was written down of a run when it began: its config, the digests of what that names, and
    the prefix of the policy it was warm-started to (null for none). None where there is no such
    run."""
    return json.loads(store.get(record_key(name))) if store.exists(record_key(name)) else None


def record_run(store: ObjectStore, name: str, inputs: Inputs, policy: str | None) -> None:
    """Writes down what the run is; once, before anything else of it exists.

    Raises:
        ConfigError: there is a run of that name.
    """
    config = inputs.config.model_dump(mode="json")
    record = {"run": name, "policy": policy, "config": config, "inputs": _digests(inputs)}
    text = json.dumps(record, indent=1)
    try:
        store.create(record_key(name), text.encode())
    except StoreConflict as error:
        raise ConfigError(f"run {name!r} exists already; resume it or start another") from error


def played_otherwise(then: dict[str, Any], config: TrainConfig) -> list[str]:
    """In what an evaluation by this configuration plays otherwise than the run that was recorded
    with another: the instruction, the limits of a trajectory, the searches; and whether on other
    questions, which that run may have learned from."""
    was, now = _as_now(then), config.model_dump(mode="json")
    sections = ("model", "data", "retrieval", "rollout")
    found = _differences({s: was[s] for s in sections}, {s: now[s] for s in sections})
    return [one for one in found if one.split(" ")[0] not in _OF_NO_TRAJECTORY]


def check_resumable(store: ObjectStore, name: str, inputs: Inputs) -> None:
    """
    Raises:
        ConfigError: there is no such run, or it has other settings, data or another policy; names
            them.
    """
    config = inputs.config
    record = recorded(store, name)
    if record is None:
        raise ConfigError(
            f"run {name!r} does not exist in the store, so it cannot be resumed; known runs: "
            f"{known_runs(store)}"
        )
    changed = _differences(_as_now(record["config"]), config.model_dump(mode="json"))
    if changed:
        raise ConfigError(
            f"run {name!r} cannot be resumed with other settings: {'; '.join(changed)}; repeat its "
            "own preset and overrides (run.json beside it has them), or start a new run"
        )
    # Settings may name what has other contents by now: a file was edited, a folder written anew.
    now, then = _digests(inputs), record.get("inputs", {})
    other = [field for field, digest in now.items() if then.get(field, digest) != digest]
    if other:
        raise ConfigError(
            f"run {name!r} cannot be resumed: {' and '.join(other)} had other contents when it "
            "began, and what it has logged was sampled with those; bring them back, or start a "
            "new run"
        )


def _digests(inputs: Inputs) -> dict[str, str | None]:
    """Field -> digest of what it names."""
    questions = blake3(text_of_questions(inputs.held_out)).hexdigest()
    return {
        "data.train": inputs.train.digest(),
        "data.held_out": questions,
        "model.path": digest_of_model(inputs.model_dir),
        "the passages to search": inputs.index_key,
    }


def _as_now(then: dict[str, Any]) -> dict[str, Any]:
    """A recorded config with the fields that it is too old to have at their defaults."""
    try:
        return TrainConfig.model_validate(then).model_dump(mode="json")
    except ValidationError:  # of fields that are no more: `_differences` names them
        return then


def _differences(then: dict, now: dict) -> Sequence[str]:
    """Fields that a resumed run must share with the run, and does not."""
    found = []
    for section, value in now.items():
        if section in FREE_TO_CHANGE:
            continue
        fields = value if isinstance(value, dict) else {section: value}
        old = then.get(section, {}) if isinstance(value, dict) else {section: then.get(section)}
        found += [
            f"{section}.{key} was {old.get(key)!r} and is {new!r}"
            for key, new in fields.items()
            if old.get(key) != new and key not in FREE_FIELDS.get(section, ())
        ]
    urls = [config["retrieval"].get("url") for config in (then, now)]
    if None in urls and urls != [None, None]:
        found.append(f"retrieval.url was {urls[0]!r} and is {urls[1]!r}")
    return found
