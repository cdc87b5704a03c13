"""The report of an evaluation: one HTML file with all in it, to be read without a network.

The page may hold whatever a passage or a policy wrote, so it forbids itself everything: its
Content-Security-Policy names the digests of its one style sheet and one script, and nothing else is
loaded, run or sent. Texts are escaped by Jinja's autoescaping or `markupsafe`. Equal input gives
equal bytes: no clock, no chance, no host in it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tasks.config import TrainConfig
from tasks.evaluation.charts import Chart, Series, figure
from tasks.evaluation.outcomes import METRIC_NAMES, Comparison
from tasks.evaluation.reader import SHADES, Reading
from tasks.metrics import Evaluation, History, StepRecord

MOST_BYTES = 1_500_000
"""Trajectories are left out when their text would make the page larger than about this."""

_FOLDER = Path(__file__).parent
_FACTS = (
    ("policy", "model.path"),
    ("held-out questions", "data.held_out"),
    ("training questions", "data.train"),
    ("steps", "training.steps"),
    ("questions a step", "rollout.questions_per_step"),
    ("trajectories a question", "rollout.group_size"),
    ("reward", "rollout.reward"),
    ("temperature", "rollout.temperature"),
    ("search turns at most", "rollout.max_search_turns"),
    ("passages a search", "retrieval.top_k"),
    ("learning rate", "training.learning_rate"),
    ("KL coefficient", "training.kl_coefficient"),
    ("seed", "seed"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """What a report is made of.

    evaluation: the one reported, the last of the history.
    comparisons: of this evaluation against `against`, an earlier one; empty: with none.
    """

    name: str
    config: TrainConfig
    history: History
    evaluation: Evaluation
    readings: Sequence[Reading]
    comparisons: Sequence[Comparison] = ()
    against: Evaluation | None = None


def render(report: Report) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(interval=_interval, share=_share)
    style, script = ((_FOLDER / name).read_text() for name in ("report.css", "report.js"))
    values = report.config.model_dump(mode="json")
    shown = _within(report.readings, MOST_BYTES)
    return environment.get_template("report.html.j2").render(
        report=report,
        evaluation=report.evaluation,
        style=Markup(style),
        script=Markup(script),
        policy=f"style-src {_digest(style)}; script-src {_digest(script)}",
        facts=[(label, _at(values, path)) for label, path in _FACTS],
        sections=_sections(values),
        charts=[figure(chart) for chart in charts(report.history)],
        readings=shown,
        left_out=len(report.readings) - len(shown),
        metric_names=METRIC_NAMES,
        shades=[f"below {100 * bound:g} %" for bound in SHADES],
    )


def charts(history: History) -> list[Chart]:
    """Curves over the steps trained: what was rewarded, how it was sampled, what it cost."""
    steps, held_out = history.steps, history.evaluations

    def curve(name: str, value: Callable[[StepRecord], float | None]) -> Series:
        points = [(float(r.step + 1), value(r)) for r in steps]
        return Series(name, [(x, float(y)) for x, y in points if y is not None])

    def measured(name: str, key: str) -> Series:
        return curve(name, lambda r: r.update.get(key))

    def evaluated(mode: str) -> Series:
        return Series(
            f"held out, {mode}",
            [(float(e.step), getattr(e, mode).exact_match) for e in held_out],
            [getattr(e, f"{mode}_interval") for e in held_out],
        )

    def a_trajectory(tokens: str) -> Callable[[StepRecord], float]:
        return lambda r: getattr(r.batch, tokens) / r.batch.trajectories

    stages = list(dict.fromkeys(name for r in steps for name in r.seconds))
    unit, size = _byte_unit([r.delta_bytes for r in steps])
    return [
        Chart(
            "Exact match, 95 % intervals",
            "exact match",
            [
                evaluated("sampled"),
                evaluated("greedy"),
                curve("training, sampled", lambda r: r.batch.exact_match),
            ],
            y_range=(0.0, 1.0),
        ),
        Chart("Reward", "mean reward", [curve("training batch", lambda r: r.batch.reward)]),
        Chart("Entropy of the policy", "nats a token", [measured("entropy", "entropy")]),
        Chart("KL to the base policy", "nats a token", [measured("KL", "kl")]),
        Chart(
            "Mismatch of sampler and trainer",
            "KL, nats a token",
            [measured("mean", "mismatch_kl")],
        ),
        Chart(
            "Largest mismatch",
            "nats",
            [measured("of any token", "mismatch_max")],
        ),
        Chart("Gradient norm", "before the clip", [measured("mean", "grad_norm")]),
        Chart(
            "Length",
            "tokens a trajectory",
            [
                curve("all", a_trajectory("tokens")),
                curve("sampled", a_trajectory("sampled_tokens")),
            ],
        ),
        Chart(
            "Searches",
            "searches a trajectory",
            [curve("training batch", lambda r: r.batch.searches)],
        ),
        Chart(
            "Valid actions, answers, evidence",
            "share",
            [
                curve("valid actions", lambda r: r.batch.valid_actions),
                curve("answered", lambda r: r.batch.answered),
                curve("gold passages found", lambda r: r.batch.gold_recall),
            ],
            y_range=(0.0, 1.0),
        ),
        Chart(
            "Seconds by stage",
            "seconds",
            [
                *(curve(name, lambda r, name=name: r.seconds.get(name)) for name in stages),
                Series("evaluate", [(float(e.step), e.seconds) for e in held_out]),
            ],
        ),
        Chart(
            "Weights published",
            f"{unit} a step",
            [curve("delta", lambda r: r.delta_bytes / size)],
        ),
    ]


def _byte_unit(counts: Sequence[int]) -> tuple[str, float]:
    largest = max(counts, default=0)
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if largest >= size:
            return unit, size
    return "bytes", 1.0


def _within(readings: Sequence[Reading], most: int) -> list[Reading]:
    """The readings in order, less those that do not fit any more."""
    kept, size = [], 0
    for one in readings:
        if size + one.size <= most:
            kept.append(one)
            size += one.size
    return kept


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _at(values: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values


def _sections(values: dict[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """The whole configuration: fields by section, those of no section first."""
    loose = [(key, value) for key, value in values.items() if not isinstance(value, dict)]
    nested = [(key, value) for key, value in values.items() if isinstance(value, dict)]
    return [("", loose), *((key, list(section.items())) for key, section in nested)]


def _interval(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3f} – {pair[1]:.3f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
