# SPDX-License-Identifier: Apache-2.0
"""Every exception that ringattn raises, and what its message says: fact, value, remedy."""

import difflib
import textwrap
from collections.abc import Collection, Mapping, Sequence

OWN = ("xla", "triton", "tpu")
"""ringattn's own backends. The distribution of each is `ringattn-` and its name."""


def did_you_mean(name: object, known: Collection[str]) -> str:
    """`" (did you mean 'x'?)"` with the known name that is most like `name`; empty if none is like it."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def in_one_line(error: BaseException) -> str:
    """The type and the message of `error`, any exception, as one line of at most 400 characters."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "its message cannot be read"
    kind = type(error).__name__
    return textwrap.shorten(f"{kind}: {message}" if message else kind, 400, placeholder=" ...")


def from_clone(*distributions: str) -> str:
    """The command that installs `distributions` of ringattn from a clone; no package index has them yet."""
    paths = " ".join(f"./packages/{name}" for name in distributions)
    return f"in a clone of the repository, run pip install {paths}"


def _or_add_xla(installed: Collection[str]) -> str:
    """The end of a remedy: how to add `ringattn-xla`, which runs every call; empty if that is installed."""
    return "" if "xla" in installed else f", or add the backend that supports everything: {from_clone('ringattn-xla')}"


class RingAttnError(Exception):
    """The base class of every exception that ringattn raises."""


class InputError(RingAttnError, ValueError):
    """An argument has a value that no backend accepts."""

    def __init__(self, argument: str, fact: str, remedy: str):
        self.argument, self.fact, self.remedy = argument, fact, remedy
        super().__init__(f"{argument}: {fact}. {remedy}")


class MeshError(RingAttnError, ValueError):
    """A mesh or an axis name does not fit the call."""


class DerivativeError(RingAttnError, NotImplementedError):
    """The call was differentiated in a way that ringattn has no rule for."""


class UnsupportedFeatureError(RingAttnError, NotImplementedError):
    """A call needs a feature or a head size that its backend does not support."""

    def __init__(self, backend: str, feature: str, why: str, others: Sequence[str], installed: Sequence[str]):
        self.backend, self.feature, self.others = backend, feature, tuple(others)
        if others:
            fallback, able = f"{backend!r}, {others[0]!r}", ", ".join(others)
            remedy = f"Installed backends that do: {able}. Pass backend=({fallback}) to allow the fallback."
        else:
            remedy = f"No installed backend does. Call without it{_or_add_xla(installed)}"
        super().__init__(f"backend {backend!r} does not support {feature} ({why}). {remedy}")


class BackendNotFoundError(RingAttnError, LookupError):
    """No installed distribution registers a backend of this name; with `name=None`, none registers any backend.

    `meant` is the known name that `name` probably misspells, or `None`.
    """

    def __init__(self, name: str | None, installed: Sequence[str]):
        self.name, self.installed = name, tuple(installed)
        close = difflib.get_close_matches(name or "", sorted({*installed, *OWN}), n=1, cutoff=0.65)
        self.meant = close[0] if close and close[0] != name else None
        if name is None:
            message = f"no ring-attention backend is installed. To add one: {from_clone('ringattn-xla')}"
        else:
            guess = f" (did you mean {self.meant!r}?)" if self.meant else ""
            message = f"no ring-attention backend {name!r}{guess}. Installed: {', '.join(installed) or 'none'}."
            # Suggest ringattn's own packages only: installing a mistyped name could install a stranger's package.
            missing = [f"ringattn-{own}" for own in OWN if own not in installed]
            if not close:
                message += f" To add all of ringattn's own: {from_clone(*missing)}" if missing else ""
            elif close[0] not in installed:
                message += f" To add it: {from_clone('ringattn-' + close[0])}"
        super().__init__(message)


class BackendLoadError(RingAttnError, ImportError):
    """The descriptor, kernel or probe of an installed backend cannot be imported, or is not what core expects.

    `what` names the broken part, with its import path. Without a `distribution`, this process registered the backend.
    """

    def __init__(self, name: str, distribution: str | None, what: str, cause: BaseException):
        self.backend, self.__cause__ = name, cause
        owner = f" of {distribution}" if distribution else ""
        remedy = f"Reinstall or uninstall {distribution}" if distribution else "Correct it"
        told = in_one_line(cause).rstrip(".")
        super().__init__(f"backend {name!r}{owner} is broken: {what}: {told}. {remedy}, or name another backend.")


class BackendVersionError(RingAttnError):
    """A backend was written for another version of the backend API."""

    def __init__(self, name: str, distribution: str, api: int, supported: range):
        self.backend, self.api = name, api
        spoken = ", ".join(map(str, supported))
        upgrade = "ringattn-core" if api >= supported.stop else distribution
        super().__init__(
            f"backend {name!r} of {distribution} speaks backend API {api}; this ringattn-core speaks {spoken}. "
            f"Upgrade the older side, {upgrade}"
        )


class DuplicateBackendError(RingAttnError):
    """Two distributions register a backend under one name."""

    def __init__(self, name: str, distributions: Sequence[str]):
        self.backend, self.distributions = name, tuple(distributions)
        super().__init__(
            f"backend {name!r} is registered by {len(self.distributions)} distributions: {', '.join(distributions)}. "
            f"Uninstall all but one: pip uninstall {distributions[-1]}"
        )


class KernelError(RingAttnError, TypeError):
    """A block kernel does not return what the protocol asks for."""

    def __init__(self, kernel: object, method: str, fact: str, remedy: str):
        self.kernel, self.method = kernel, method
        super().__init__(f"{type(kernel).__name__}.{method} {fact}. {remedy}")


class TuningError(RingAttnError, RuntimeError):
    """No configuration of the backend can be measured for this problem."""

    def __init__(self, name: str, fact: str, remedy: str):
        self.backend = name
        super().__init__(f"backend {name!r} cannot be tuned: {fact}. {remedy}")


class ToolsNotFoundError(RingAttnError, ImportError):
    """`ringattn-tools`, the distribution of the command line and of the autotuner's search, is not installed."""

    def __init__(self, what: str):
        adding = from_clone("ringattn-tools")
        super().__init__(f"{what} needs ringattn-tools, which is not installed. To add it: {adding}")


class BackendUnavailableError(RingAttnError, RuntimeError):
    """A backend is installed but cannot run on these devices."""

    def __init__(self, name: str, reason: str):
        self.backend, self.reason = name, reason
        super().__init__(
            f"backend {name!r} cannot run here: {reason.rstrip('.')}. Leave backend unset, or name another one."
        )


class NoBackendError(RingAttnError, RuntimeError):
    """None of several backends can run the call; `reasons` says why, by backend."""

    def __init__(self, platform: str, reasons: Mapping[str, str], installed: Sequence[str]):
        self.platform, self.reasons = platform, dict(reasons)
        listed = "".join(f"\n  {name}: {reason.rstrip('.')}." for name, reason in self.reasons.items())
        super().__init__(
            f"no ring-attention backend can run this call on {platform!r}:{listed}\n"
            f"Call without what they lack{_or_add_xla(installed)}"
        )
