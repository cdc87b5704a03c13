"""The report: whole, self-contained, the same every time, and inert whatever a passage says."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from tasks.evaluation.charts import Chart, Series, figure, ticks
from tasks.evaluation.reader import choose, of_the_reward, reading, shade, why
from tasks.evaluation.report import MOST_BYTES, charts, render
from tasks.metrics import History, StepRecord
from tasks.presets import resolve
from tasks.rollout.trajectory import Trajectory
from tests.evaluation_helpers import (
    evaluation,
    group,
    question,
    report,
    summary,
    tokenizer,
    trajectory,
)

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]

ATTACK = (
    "</div><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    '<a href="javascript:alert(1)">x</a><!-- </style><svg onload=alert(1)> <iframe src=//evil>'
)
VOID = {"meta", "link", "img", "br", "hr", "input", "base"}


class Strict(HTMLParser):
    """Every element is closed, in order; keeps what could reach out of the page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def parsed(page: str) -> Strict:
    found = Strict()
    found.feed(page)
    found.close()
    assert not found.open, f"never closed: {found.open}"
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return render(report())


@pytest.fixture(scope="module")
def attacked() -> str:
    return render(report(seen=ATTACK, said=ATTACK))


def test_it_is_well_formed_and_has_every_part(page: str) -> None:
    found = parsed(page)
    assert len(found.ids) == len(set(found.ids))
    assert {"summary", "curves", "trajectories", "configuration", "t1"} <= set(found.ids)
    captions = "".join(found.texts["figcaption"])
    for curve in (
        *("Exact match", "Reward", "Entropy", "KL", "Mismatch", "Length", "Searches"),
        *("Valid actions", "Seconds by stage", "Weights published"),
    ):
        assert curve in captions, curve
    writers = {a["class"] for tag, a in found.elements if tag == "div" and "segment" in _class(a)}
    assert writers == {"segment prompt", "segment sampled", "segment observed"}
    labels = "".join(found.texts["text"])
    for unit in ("nats a token", "tokens a trajectory", "seconds", "kB a step", "step"):
        assert unit in labels, unit


def test_each_curve_is_of_what_it_says() -> None:
    """On a run whose every number is another."""
    last = report(6).evaluation
    batch = replace(
        last.sampled,
        trajectories=2,
        tokens=620,
        sampled_tokens=42,
        reward=0.11,
        exact_match=0.12,
        answered=0.13,
        searches=1.4,
        gold_recall=0.15,
    )
    update = {"entropy": 0.21, "kl": 0.22, "mismatch_kl": 0.23, "mismatch_max": 0.24}
    seconds = {"rollout": 31.0, "update": 32.0, "publish": 33.0}
    held_out = replace(
        last,
        step=1,
        seconds=34.0,
        greedy=replace(last.greedy, exact_match=0.41),
        sampled=replace(last.sampled, exact_match=0.42),
        greedy_interval=(0.4, 0.5),
        sampled_interval=(0.3, 0.6),
    )
    record = StepRecord(0, 1, batch, update | {"grad_norm": 0.25}, seconds, 5_000, 9_000)
    drawn = charts(History([record], [held_out]))
    assert {
        (chart.title, series.name): series.points for chart in drawn for series in chart.series
    } == {
        (title, name): [(1.0, pytest.approx(value))]
        for title, name, value in [
            ("Exact match, 95 % intervals", "held out, sampled", 0.42),
            ("Exact match, 95 % intervals", "held out, greedy", 0.41),
            ("Exact match, 95 % intervals", "training, sampled", 0.12),
            ("Reward", "training batch", 0.11),
            ("Entropy of the policy", "entropy", 0.21),
            ("KL to the base policy", "KL", 0.22),
            ("Mismatch of sampler and trainer", "mean", 0.23),
            ("Largest mismatch", "of any token", 0.24),
            ("Gradient norm", "mean", 0.25),
            ("Length", "all", 310.0),
            ("Length", "sampled", 21.0),
            ("Searches", "training batch", 1.4),
            ("Valid actions, answers, evidence", "valid actions", batch.valid_actions),
            ("Valid actions, answers, evidence", "answered", 0.13),
            ("Valid actions, answers, evidence", "gold passages found", 0.15),
            ("Seconds by stage", "rollout", 31.0),
            ("Seconds by stage", "update", 32.0),
            ("Seconds by stage", "publish", 33.0),
            ("Seconds by stage", "evaluate", 34.0),
            ("Weights published", "delta", 5.0),
        ]
    }
    intervals = [series.intervals for series in drawn[0].series]
    assert intervals == [[(0.3, 0.6)], [(0.4, 0.5)], None]


def test_the_tables_and_verdicts_hold_what_was_measured(page: str) -> None:
    made = report()
    cells = [
        [
            re.sub(r"<[^>]+>|\s+", " ", cell).split()
            for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
        ]
        for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    ]
    table = iter(cells)
    for row in sorted(made.evaluation.rows, key=lambda row: row.mode):
        shown = next(line for line in table if line[0][-1:] == [row.label.split()[-1]])
        assert shown[1] == [str(row.questions)]
        assert shown[2][0] == f"{row.exact_match:.3f}"
        assert shown[3][0] == f"{row.f1:.3f}"
        counts = (row.answered, row.truncated, row.out_of_turns, row.invalid)
        assert [cell[0] for cell in shown[4:8]] == [str(count) for count in counts]
        assert shown[8] == [f"{row.searches:.2f}"]
    assert made.comparisons
    for one in made.comparisons:
        shown = next(line for line in table if one.mode in line[0])
        numbers = [cell[0] for cell in shown[1:]]
        mean, p = f"{one.difference.mean:+.3f}", f"{one.difference.p_value:.4f}"
        assert numbers == [*(str(one.questions), f"{one.second:.3f}", f"{one.first:.3f}", mean, p)]
    verdicts = html.unescape(page)
    assert all(f"<dt>why</dt><dd>{one.why}</dd>" in verdicts for one in made.readings)


def test_it_needs_nothing_else(page: str) -> None:
    for tag, attributes in parsed(page).elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert not {"src", "srcset", "style"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"https?://|url\(|@import", page)


def test_only_its_own_script_and_style_may_run(page: str) -> None:
    found = parsed(page)
    (policy,) = [a["content"] or "" for tag, a in found.elements if a.get("http-equiv") is not None]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (text,) = found.texts[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_texts_of_others_are_only_text(page: str, attacked: str) -> None:
    harmless, found = parsed(page), parsed(attacked)
    kinds = [{tag for tag, _ in one.elements} for one in (harmless, found)]
    assert kinds[0] == kinds[1], "no element comes out of a text"
    assert len(found.texts["script"]) == 1
    assert "<img src=x" in "".join(found.texts["div"]), "and the text is there"


def test_equal_input_gives_equal_bytes(page: str) -> None:
    assert render(report()) == page


def test_what_was_sampled_is_shaded_token_by_token(page: str) -> None:
    shades = [a for tag, a in parsed(page).elements if tag == "i" and "data-l" in a]
    one = report().readings[0].trajectory
    assert len(shades) >= one.sampled_tokens
    assert [shade(value) for value in (0.0, -0.2, -1.0, -2.0, -4.0, -9.0, float("-inf"))] == [
        *(0, 1, 2, 3, 4, 5, 5)
    ]


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    asked, text = question(0), "<think> Zürich 東京 🎬 </think>"
    made = trajectory(asked, "1942", said=text)
    found = reading("greedy", asked, group(asked, made), 0, tokenizer(), resolve("tiny").rollout)
    shown = parsed(f"<p>{found.segments[1].html}</p>")
    assert text in "".join(shown.texts["i"])
    turn = made.turns[0]
    values = " ".join(a["data-l"] or "" for _, a in shown.elements if "data-l" in a).split()
    assert [float(v) for v in values] == pytest.approx(
        made.logprobs[turn.start : turn.sampled_end].tolist(), abs=0.006
    )


def test_the_reward_says_what_it_was_given_for() -> None:
    asked = question(0)
    made = replace(trajectory(asked, "1942"), reward=1.125, search_r1=True)
    unanswered = replace(trajectory(asked, None), reward=0.0)

    def said(of: Trajectory, **rollout: Any) -> str:
        return of_the_reward(of, resolve("tiny", {"rollout": rollout}).rollout)

    assert said(made, format_bonus=0.125) == (
        "The reward is 1.12, for exact match, 0.125 of it for an answer that is well formed."
    )
    assert said(unanswered, format_bonus=0.125) == "The reward is 0, for exact match."
    assert said(made, reward="search_r1").endswith("and calls it right.")
    assert "by tests.reward_functions:told" in said(made, reward="tests.reward_functions:told")


def test_the_verdict_says_why() -> None:
    asked = question(0)
    assert "and so does a gold one" in why(trajectory(asked, "1942."), asked.answers)
    partly = why(trajectory(asked, "in 1942"), asked.answers)
    assert "“in 1942”" in partly
    assert "not “1942”; the words they share: 1942" in partly
    assert "used up its turns" in why(trajectory(asked, None), asked.answers)


def test_trajectories_are_chosen_right_and_wrong_from_all_over() -> None:
    asked = [question(i) for i in range(100)]
    right = [group(q, trajectory(q, "1942")) for q in asked]
    mixed = [group(q, trajectory(q, "1942" if i % 25 else "1")) for i, q in enumerate(asked)]
    found = choose({"greedy": [*map(summary, right)], "sampled": [*map(summary, mixed)]}, 32)
    assert len(found) == 32
    wrong = [c for c in found if not c.group.trajectories[c.number].exact_match]
    assert [c.group.question_id for c in wrong] == ["q0", "q25", "q50", "q75"]
    assert [c.mode for c in found].count("greedy") == 14
    assert found == choose({"greedy": [*map(summary, right)], "sampled": [*map(summary, mixed)]})
    assert len(choose({"greedy": [summary(right[0])], "sampled": [summary(right[0])]})) == 2


def test_it_stays_small_however_long_the_trajectories_are(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(page.encode()) < MOST_BYTES
    monkeypatch.setattr("tasks.evaluation.report.MOST_BYTES", 9_000)
    found = render(report())
    assert len(found) < len(page) - 9_000
    assert "too long to show" in found
    assert 1 < found.count("<article") < page.count("<article")


def test_an_evaluation_by_itself_has_no_curves() -> None:
    asked = [question(0)]
    made = [group(asked[0], trajectory(asked[0], "1942"))]
    last, _ = evaluation(asked, {"greedy": made, "sampled": made}, step=0)
    alone = report(1)
    alone = type(alone)(alone.name, alone.config, History(evaluations=[last]), last, [])
    found = render(alone)
    parsed(found)
    assert "an evaluation by itself" in found


def test_charts_survive_odd_numbers() -> None:
    for points in ([], [(1.0, 2.0)], [(0.0, float("nan")), (1.0, 3.0)], [(0.0, 5.0), (9.0, 5.0)]):
        text = figure(Chart("<t>", "<y>", [Series("<s>", points)]))
        parsed(text)
        assert "nan" not in text
    assert ticks(0, 1, 6) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(3, 3, 5)
    for low, high in ((0, 1e-7), (-3, 40), (0, 123_456), (0.91, 0.93)):
        found = ticks(low, high, 6)
        assert len(found) <= 6
        assert found[0] <= low < high <= found[-1]


# In a browser


def _chromium() -> str:
    """A Chromium of this machine; no Python package ships one, and tests download nothing."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium on the PATH: the report is not looked at in a browser")


def _browse(folder: Path, page: str, *options: str) -> str:
    path = folder / "report.html"
    path.write_text(page)
    command = [
        _chromium(),
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,2600",
        *options,
        path.as_uri(),
    ]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


def test_in_chromium_one_trajectory_is_shown_and_no_text_runs(
    attacked: str, tmp_path: Path
) -> None:
    document = _browse(tmp_path, attacked, "--dump-dom")
    assert 'class="reader paged"' in document, "its own script ran"
    articles = re.findall(r"<article [^>]*>", document)
    assert len(articles) > 4
    assert [a for a in articles if "hidden" not in a] == articles[:1]
    assert "<title>owned" not in document
    assert "<img" not in document


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screenshot(page: str, tmp_path: Path, scheme: str) -> None:
    options = ["--screenshot=shot.png", "--force-device-scale-factor=1"]
    if scheme == "dark":
        options.append("--blink-settings=preferredColorScheme=0")
    _browse(tmp_path, page, *options)
    pixels = _pixels((tmp_path / "shot.png").read_bytes())
    assert pixels.shape[:2] == (2600, 1280)
    corner = pixels[0, 0].astype(int)
    assert (corner.sum() > 600) == (scheme == "light"), corner
    differs = np.abs(pixels.astype(int) - corner).sum(axis=2) > 30
    assert 0.02 < differs.mean() < 0.95, "text and charts on a page"
    # The curves are drawn, each in its colour: blue, orange, green.
    colours = pixels.reshape(-1, 3).astype(int)
    for strong, weak in ((2, 0), (0, 2), (1, 0)):
        assert (colours[:, strong] - colours[:, weak] > 50).sum() > 300


def _pixels(png: bytes) -> np.ndarray:
    """uint8 [H, W, 3]."""
    return (imread(io.BytesIO(png))[:, :, :3] * 255).astype(np.uint8)


def _class(attributes: dict[str, str | None]) -> str:
    return attributes.get("class") or ""
