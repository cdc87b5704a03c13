"""Make a policy that knows the search protocol: the start of a preset's reinforcement learning.

    python -m flows.warm_start --preset tiny --base new --output deployments/policies/tiny ...

writes a Hugging Face folder and `provenance.json`. A preset with `model.warm_start` does the same
inside its own runs, once; this flow is for keeping the result, as the repository does for `tiny`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from prefect import flow, get_run_logger
from pydantic import BaseModel

from flows.cli import overrides_from, run_flow
from infra.state import home_folder
from tasks.config import Overrides, resolve
from tasks.data.hotpotqa import load_questions
from tasks.errors import ConfigError

REPORT_EVERY = 50


class Made(BaseModel):
    """The policy's folder and where it comes from."""

    folder: str
    provenance: dict[str, Any]

    def line(self, label: str, seconds: float) -> str:
        """The result for a human, one line."""
        loss = self.provenance["final_loss"]
        return f"{label}: policy in {self.folder}, loss {loss:.3f}, {seconds:.0f} s"


@flow(name="warm-start", persist_result=False)
def warm_start(
    output: str,
    preset: str = "tiny",
    base: str | None = None,
    overrides: Overrides | None = None,  # type: ignore[valid-type]
) -> Made:
    """Fine-tunes a policy on demonstrations of the preset's own questions.

    Args:
        output: Folder to write; must not exist.
        preset: A file of deployments/presets, without its ending.
        base: Model to start from instead of the preset's; "new" makes the tiny one from nothing.
        overrides: Fields to change in the preset; model.warm_start says how.
    """
    from tasks.data.questions import pool
    from tasks.retrieval.bm25 import build
    from tasks.training import tiny_policy
    from tasks.training import warm_start as work
    from tasks.training.demonstrations import Corpus, chosen_questions
    from tasks.training.policy import load_policy, load_tokenizer, resolve_model_dir

    log = get_run_logger()
    config = resolve(preset, overrides)
    settings = work.settings_of(config)
    folder = Path(output)
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not, or remove it")
    questions = load_questions(config.data.train)
    model: Any
    tokenizer: Any
    if base == "new":
        tokenizer = tiny_policy.build_tokenizer()
        model = tiny_policy.build_model(tokenizer, config.seed)
    else:
        found = resolve_model_dir(base or config.model.path, home_folder() / "cache" / "models")
        tokenizer = load_tokenizer(found, config.model.chat)
        model = load_policy(found)
    passages = pool(questions)
    index = build(passages, config.retrieval.k1, config.retrieval.b)

    def report(step: int, steps: int, loss: float) -> None:
        if step % REPORT_EVERY == 0 or step + 1 == steps:
            log.info("step %d of %d, loss %.3f", step, steps, loss)

    chosen = chosen_questions(questions, settings, config.seed)
    corpus = Corpus(chosen, index)
    provenance = work.warm_start(config, model, tokenizer, corpus, report)
    provenance["base"] = base or config.model.path
    work.save_policy(model, tokenizer, provenance, folder)
    return Made(folder=str(folder), provenance=provenance)


def main(
    output: Annotated[str, typer.Option(help="Folder to write; must not exist.")],
    preset: Annotated[str, typer.Option(help="A file of deployments/presets.")] = "tiny",
    base: Annotated[str | None, typer.Option(help="Start model; 'new' for a tiny one.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Any field: model.warm_start.good_share=0.3")
    ] = None,
) -> None:
    """Makes a policy by supervised fine-tuning on demonstrations."""
    run_flow(
        "warm-start",
        warm_start,
        lambda: {
            "output": output,
            "preset": preset,
            "base": base,
            "overrides": overrides_from({}, changes or ()),
        },
        lambda config: load_questions(config.data.train),
    )


if __name__ == "__main__":
    typer.run(main)
