"""Presets and what is changed in them: a file, overrides, and the `TrainConfig` they make.

`Overrides` is the tree of `TrainConfig` with every field optional; `resolve(preset, overrides)`
validates the sum of both as a whole before anything is started.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel, Field, ValidationError, create_model

from tasks.config import TrainConfig
from tasks.errors import ConfigError

PRESETS = Path(__file__).resolve().parent.parent / "deployments" / "presets"


def _optional_twin(model: type[BaseModel], name: str) -> type[BaseModel]:
    """The same fields, bounds and descriptions, each optional and None by default."""
    fields: dict[str, Any] = {}
    hints = get_type_hints(model)
    for key, field in model.model_fields.items():
        section = _section_of(hints[key])
        if section is not None:
            twin = _optional_twin(section, section.__name__.replace("Config", "Overrides"))
            fields[key] = (twin | None, Field(None, description=section.__doc__))
        else:
            inner: Any = Annotated[hints[key], *field.metadata] if field.metadata else hints[key]
            fields[key] = (inner | None, Field(None, description=field.description))
    return create_model(name, __config__=model.model_config, __doc__=model.__doc__, **fields)


def _section_of(hint: Any) -> type[BaseModel] | None:
    """The section a field holds, also where it is optional."""
    for choice in (hint, *get_args(hint)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


Overrides: type[BaseModel] = _optional_twin(TrainConfig, "Overrides")


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A tree of fields with the changes laid over it, section by section; neither is changed."""
    merged = dict(base)
    for key, value in changes.items():
        deeper = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if deeper else value
    return merged


def resolve(preset: str, overrides: BaseModel | dict[str, Any] | None = None) -> TrainConfig:
    """Preset plus overrides, validated whole.

    Raises:
        ConfigError: the preset does not exist, or a field is unknown, out of range or at odds
            with another; names each field, its value and what was expected.
    """
    path = PRESETS / f"{preset}.toml"
    if preset not in preset_names():
        raise ConfigError(f"preset {preset!r} does not exist; choose one of {preset_names()}")
    if isinstance(overrides, BaseModel):
        overrides = overrides.model_dump(exclude_none=True)
    try:
        merged = merge(tomllib.loads(path.read_text()), overrides or {})
        return TrainConfig.model_validate(merged)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; mend it") from None
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in item['loc']) or 'config'}: {item['msg']} "
            f"(got {_short(item['input'])})"
            for item in error.errors()
        ]
        raise ConfigError(f"preset {preset!r} with these overrides: " + "; ".join(lines)) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
