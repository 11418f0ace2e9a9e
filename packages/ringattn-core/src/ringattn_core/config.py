# SPDX-License-Identifier: Apache-2.0
"""The configuration of a call: its backend, and the block sizes of the kernels. Frozen, hashable, compared by value."""

import dataclasses
import json
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from .errors import InputError, did_you_mean

_EJKERNEL_FIELDS: Final = frozenset(
    ("blocksize_m", "blocksize_k", "blocksize_n", "blocksize_heads", "blocksize_keys", "num_key_splits")
)
_HARDWARE: Final = frozenset(("cpu", "gpu", "mps"))
"""Values that `ejkernel`'s field `backend` has for hardware; as `backend` here they name no backend of ringattn."""


def _frozen(owner: str, extra: Any) -> tuple[tuple[str, Any], ...]:
    """The values of the field `extra`, sorted by name, with tuples for lists; raises unless they can be hashed."""
    try:
        named = dict(extra)
        if not all(isinstance(name, str) for name in named):
            raise TypeError
        frozen = tuple((name, _freeze(named[name])) for name in sorted(named))
        hash(frozen)
    except (TypeError, ValueError):
        remedy = "Pass a dict of named values: numbers, strings or tuples"
        raise InputError(f"{owner}.extra", f"got {extra!r}", remedy) from None
    return frozen


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


def _refuse_unknown(owner: str, given: Iterable[str], known: tuple[str, ...], remedy: str) -> None:
    for name in given:
        if name not in known:
            fact = f"unknown field {name!r}{did_you_mean(name, known)}"
            raise InputError(owner, fact, f"Known fields: {', '.join(known)}. {remedy}")


@dataclasses.dataclass(frozen=True)
class _Params:
    """The tile sizes and launch sizes of a kernel. Each is positive, or `None`: the backend chooses."""

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
                fact, remedy = f"got {size!r}, not a positive integer", "Leave it None to let the backend choose"
                raise InputError(f"{owner}.{name}", fact, remedy)
            object.__setattr__(self, name, int(size))
        object.__setattr__(self, "extra", _frozen(owner, self.extra))

    @classmethod
    def of(cls, value: Any) -> Self:
        """Converts `value` to this class: `None`, a mapping, or another library's dataclass, such as `ejkernel`'s.

        Fields of another library's dataclass that have no counterpart here go to `extra`, unless they are `None`.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        fields: dict[str, Any]
        if isinstance(value, Mapping):
            fields, foreign = dict(value), _EJKERNEL_FIELDS
        elif dataclasses.is_dataclass(value) and not isinstance(value, (type, _Params)):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            foreign = frozenset(fields)
        else:
            remedy = f"Pass a {cls.__name__}, a dict of its fields, or None"
            raise InputError(cls.__name__, f"got {value!r}, a {type(value).__name__}", remedy)
        known = (*_SIZES, "extra")
        own = [name for name in fields if name in known or name not in foreign]
        _refuse_unknown(cls.__name__, own, known, "Values that only some backends read go in extra={...}")
        others = {name: x for name, x in fields.items() if name not in known and x is not None}
        extra = dict(_frozen(cls.__name__, fields.get("extra", ()))) | others
        return cls(**{name: fields[name] for name in _SIZES if name in fields}, extra=tuple(extra.items()))

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
    """Which backend runs a call, and with which tile sizes.

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
        if platform != "auto" and backend not in ("any", "auto", self.backend_name, *_HARDWARE):
            raise InputError("RingAttentionConfig", f"{platform=} and {backend=} name two backends", "Pass one")

    @property
    def backend_name(self) -> str | None:
        """The name of the backend asked for; `None` if any backend may run the call."""
        if self.platform != "auto":
            return "tpu" if self.platform == "pallas" else self.platform
        return None if self.backend in ("any", "auto") else self.backend

    @classmethod
    def of(cls, value: Any, argument: str) -> Self:
        """`value`, if a configuration; else one made from a mapping of its fields. Errors name `argument`."""
        return value if isinstance(value, cls) else cls.from_dict(value, argument)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, from which `from_dict` makes an equal configuration."""
        return {
            "fwd_params": self.fwd_params.to_dict(),
            "bwd_params": self.bwd_params.to_dict(),
            "platform": self.platform,
            "backend": self.backend,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], argument: str = "RingAttentionConfig") -> Self:
        """The inverse of `to_dict`; an unknown key raises an error that names the key."""
        if not isinstance(data, Mapping):
            remedy = f"Pass a {cls.__name__}, or a dict of its fields"
            raise InputError(argument, f"got {type(data).__name__}", remedy)
        _refuse_unknown(cls.__name__, data, tuple(field.name for field in dataclasses.fields(cls)), "Remove it")
        return cls(**data)

    def to_json(self) -> str:
        """`to_dict` as JSON, the same text for equal configurations."""
        try:
            return json.dumps(self.to_dict(), sort_keys=True)
        except TypeError as error:
            fact, remedy = f"cannot be written as JSON: {error}", "Keep numbers, strings and tuples in extra"
            raise InputError(type(self).__name__, fact, remedy) from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise InputError(cls.__name__, f"not JSON: {error}", "Pass what to_json wrote") from error
        return cls.from_dict(data)


def backend_and_params(cfg: Any, backend: Any) -> tuple[Any, dict[str, Any]]:
    """The backend and the kernel parameters that a call asks for, from its arguments `cfg` and `backend`.

    `backend` comes before the backend that `cfg` names.
    """
    config = RingAttentionConfig.of({} if cfg is None else cfg, "cfg")
    params = {"fwd_params": config.fwd_params, "bwd_params": config.bwd_params}
    return config.backend_name if backend is None else backend, params
