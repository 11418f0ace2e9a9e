# SPDX-License-Identifier: Apache-2.0
"""The configuration of a call: its backend, and the block sizes of the kernels. Frozen, hashable, compared by value."""

import dataclasses
import json
import numbers
from collections.abc import Mapping
from typing import Any, Final, Self

from .errors import InputError, did_you_mean

_EJKERNEL_FIELDS: Final = frozenset(
    ("blocksize_m", "blocksize_k", "blocksize_n", "blocksize_heads", "blocksize_keys", "num_key_splits")
)
_PLATFORM_ALIASES: Final = {"pallas": "tpu"}
_HARDWARE: Final = frozenset(("cpu", "gpu", "mps"))


def _named(owner: str, extra: Any) -> dict[str, Any]:
    """The values of the field `extra` by name; raises unless each has a name."""
    try:
        found = dict(extra)
    except (TypeError, ValueError):
        found = None
    if found is None or not all(isinstance(name, str) for name in found):
        raise InputError(f"{owner}.extra", f"got {extra!r}", "Pass a dict of named values, or pairs of name and value")
    return found


@dataclasses.dataclass(frozen=True)
class _Params:
    """The sizes of a kernel. Each is positive, or `None`: the backend chooses."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    extra: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in _SIZES:
            size = getattr(self, name)
            if size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
                raise InputError(
                    f"{owner}.{name}",
                    f"got {size!r}, not a positive integer",
                    "Leave it None to let the backend choose",
                )
            object.__setattr__(self, name, int(size))
        extra = _named(owner, self.extra)
        frozen = tuple((name, _freeze(extra[name])) for name in sorted(extra))
        try:
            hash(frozen)
        except TypeError:
            raise InputError(
                f"{owner}.extra", f"{extra!r} cannot be hashed", "Use numbers, strings or tuples"
            ) from None
        object.__setattr__(self, "extra", frozen)

    @classmethod
    def of(cls, value: Any) -> Self:
        """Converts `value` to these parameters: `None`, a mapping, or any dataclass such as `ejkernel`'s.

        Fields of another library's dataclass that have no counterpart here go to `extra`, unless they are `None`.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls._from_fields(dict(value), foreign=_EJKERNEL_FIELDS)
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, _Params)):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return cls._from_fields(fields, foreign=frozenset(fields))
        raise InputError(
            cls.__name__,
            f"got {value!r}, a {type(value).__name__}",
            f"Pass a {cls.__name__}, a dict of its fields, or None",
        )

    @classmethod
    def _from_fields(cls, fields: dict[str, Any], foreign: frozenset[str]) -> Self:
        known = {name: fields.pop(name) for name in (*_SIZES, "extra") if name in fields}
        unknown = {name: value for name, value in fields.items() if name not in foreign}
        _refuse_unknown(
            cls.__name__, unknown, (*_SIZES, "extra"), "Values that only some backends read go in extra={...}"
        )
        more = {name: value for name, value in fields.items() if value is not None}
        if more:
            known["extra"] = {**_named(cls.__name__, known.get("extra") or ()), **more}
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as plain data; the inverse of `of`."""
        sizes = {name: getattr(self, name) for name in _SIZES if getattr(self, name) is not None}
        return {**sizes, "extra": dict(self.extra)} if self.extra else sizes


_SIZES: Final = tuple(field.name for field in dataclasses.fields(_Params) if field.name != "extra")


@dataclasses.dataclass(frozen=True)
class FwdParams(_Params):
    """How the forward kernel runs. A size that is `None` is left to the backend.

    Args:
        q_blocksize: The number of queries in a tile.
        kv_blocksize: The number of keys in a tile.
        num_warps: The number of warps of a program (GPU).
        num_stages: How many tiles are loaded ahead (GPU).
        extra: Named values that only some backends read: a dict, or pairs of name and value.
    """


@dataclasses.dataclass(frozen=True)
class BwdParams(_Params):
    """How the backward kernels run.

    `q_blocksize`, `kv_blocksize`, `num_warps`, `num_stages` and `extra` mean what they mean in `FwdParams`.
    """


@dataclasses.dataclass(frozen=True)
class RingAttentionConfig:
    """Which backend runs a call, and with which sizes.

    Args:
        fwd_params: `FwdParams`, or a dict of its fields.
        bwd_params: `BwdParams`, or a dict of its fields.
        platform: The name of a backend, or "auto". This is `ejkernel`'s field; "pallas" there is "tpu" here.
        backend: The name of a backend, or "any".
    """

    fwd_params: FwdParams = FwdParams()
    bwd_params: BwdParams = BwdParams()
    platform: str = "auto"
    backend: str = "any"

    def __init__(self, fwd_params: Any = None, bwd_params: Any = None, platform: str = "auto", backend: str = "any"):
        object.__setattr__(self, "fwd_params", FwdParams.of(fwd_params))
        object.__setattr__(self, "bwd_params", BwdParams.of(bwd_params))
        for name, value, default in (("platform", platform, "auto"), ("backend", backend, "any")):
            if not isinstance(value, str) or not value:
                raise InputError(f"RingAttentionConfig.{name}", f"got {value!r}", f"Pass a name, or {default!r}")
            object.__setattr__(self, name, str(value))
        named = _PLATFORM_ALIASES.get(platform, platform)
        if platform != "auto" and backend not in ("any", "auto", named, *_HARDWARE):
            raise InputError(
                "RingAttentionConfig", f"platform={platform!r} and backend={backend!r} name two backends", "Pass one"
            )

    @classmethod
    def of(cls, value: Any, argument: str) -> Self:
        """Returns a configuration as it is, and makes one of a mapping of its fields. Errors name the `argument`."""
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if not isinstance(value, cls):
            fact = f"got {type(value).__name__}"
            raise InputError(argument, fact, f"Pass a {cls.__name__}, or a dict of its fields")
        return value

    @property
    def backend_name(self) -> str | None:
        """The name of the backend asked for; `None` where any will do."""
        if self.platform != "auto":
            return _PLATFORM_ALIASES.get(self.platform, self.platform)
        return None if self.backend in ("any", "auto") else self.backend

    def to_dict(self) -> dict[str, Any]:
        """Plain data, from which `from_dict` makes an equal configuration."""
        return {
            "fwd_params": self.fwd_params.to_dict(),
            "bwd_params": self.bwd_params.to_dict(),
            "platform": self.platform,
            "backend": self.backend,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; an unknown key raises an error that names it."""
        if not isinstance(data, Mapping):
            raise InputError(cls.__name__, f"got a {type(data).__name__}", "Pass a mapping")
        names = tuple(field.name for field in dataclasses.fields(cls))
        _refuse_unknown(cls.__name__, {name: data[name] for name in data if name not in names}, names, "Remove it")
        return cls(**data)

    def to_json(self) -> str:
        """`to_dict` as JSON, the same text for equal configurations."""
        try:
            return json.dumps(self.to_dict(), sort_keys=True)
        except TypeError as error:
            raise InputError(
                type(self).__name__, f"cannot be written as JSON: {error}", "Keep numbers, strings and tuples in extra"
            ) from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise InputError(cls.__name__, f"not JSON: {error}", "Pass what to_json wrote") from error
        return cls.from_dict(data)


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value


def _refuse_unknown(owner: str, unknown: Mapping[str, Any], known: tuple[str, ...], remedy: str) -> None:
    for name in unknown:
        raise InputError(
            owner, f"unknown field {name!r}{did_you_mean(name, known)}", f"Known fields: {', '.join(known)}. {remedy}"
        )
