"""The declaration of a setting: once, with all that its users need. No torch here.

``EngineConfig`` and ``SamplingParams`` are made of such fields. What the Python interface checks,
the command line's options, what is sent to other processes, and the table in docs/settings.md
follow from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from specplug.bounds import check_integer, check_seconds
from specplug.errors import UsageError, shown

_KEY = "specplug.setting"

MAX_PORT = 65535


class Check(Protocol):
    """Refuses values of a setting."""

    def __call__(self, name: str, value: Any) -> None:
        """Check a value that is not None.

        Raises:
            UsageError: the value cannot be used; the message names it and what is expected.
        """


def _refuse(name: str, value: Any, expected: str) -> None:
    raise UsageError(f"{name}={shown(value)}: expected {expected}")


@attrs.frozen
class Anything:
    """Takes every value; others check it later."""

    def __call__(self, name: str, value: Any) -> None:
        """Take the value."""


@attrs.frozen(kw_only=True)
class Integer:
    """An integer.

    Attributes:
        least, most: the smallest and the largest; None: any.
        bound: name of the largest value in ``specplug.bounds``, and of the setting in messages.
        expected: what messages ask for; "" for what follows from the other attributes.
    """

    least: int | None = 1
    most: int | None = None
    bound: str = ""
    expected: str = ""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse a value that is no integer or out of range."""
        if not self.expected and self.least is not None:
            check_integer(self.bound or name, value, least=self.least)
        elif (
            type(value) is not int
            or (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
        ):
            _refuse(name, value, self.expected or "an integer")


@attrs.frozen
class Number:
    """A number.

    Attributes:
        low, high: the smallest and the largest.
        expected: what messages ask for.
        low_open: ``low`` itself is too small.
    """

    low: float
    high: float
    expected: str
    low_open: bool = attrs.field(default=False, kw_only=True)

    def __call__(self, name: str, value: Any) -> None:
        """Refuse a value that is no number or out of range."""
        inside = (type(value) is float or type(value) is int) and (
            self.low < value if self.low_open else self.low <= value
        )
        if not inside or value > self.high or math.isnan(value):
            _refuse(name, value, self.expected)


@attrs.frozen
class Seconds:
    """A duration, above 0 and at most ``MAX_SECONDS``."""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse a value that is no such duration."""
        check_seconds(name, value)


@attrs.frozen
class Flag:
    """True or False."""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse all other values."""
        if type(value) is not bool:
            _refuse(name, value, "True or False")


@attrs.frozen
class Choice:
    """One of some names.

    Attributes:
        names: all that can be used.
        expected: what messages ask for.
        options: those that the command line takes; () for all.
    """

    names: tuple[str, ...]
    expected: str
    options: tuple[str, ...] = ()

    def __call__(self, name: str, value: Any) -> None:
        """Refuse other names."""
        if not isinstance(value, str) or value not in self.names:
            _refuse(name, value, self.expected)


@attrs.frozen(kw_only=True)
class Text:
    """A text that is not empty.

    Attributes:
        expected: what messages ask for.
        from_file: on the command line ``@FILE`` is the text in a file.
        most: characters; None: any number.
        secret: no message, ``repr`` or ``effective_config`` shows it.
    """

    expected: str
    from_file: bool = False
    most: int | None = None
    secret: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Refuse a value that is no text, or too long."""
        if not (isinstance(value, str) and value):
            self._refuse(name, value, self.expected)
        if self.most is not None and len(value) > self.most:
            self._refuse(name, value, f"{self.expected}, of at most {self.most} characters")

    def _refuse(self, name: str, value: Any, expected: str) -> None:
        if self.secret:
            raise UsageError(f"{name} is no such value: expected {expected}")
        _refuse(name, value, expected)


@attrs.frozen(kw_only=True)
class Address:
    """An address with a port.

    Attributes:
        form: regular expression of an address; its group, if it takes part, is the port: a number
            that must be at most ``MAX_PORT``, or what stands for any.
        expected: what messages ask for.
        several: several may be given, with commas between them.
    """

    form: str
    expected: str
    several: bool = False

    def __call__(self, name: str, value: Any) -> None:
        """Refuse a value that is no address, or whose port cannot exist."""
        several = self.several and isinstance(value, str)
        for one in map(str.strip, value.split(",")) if several else [value]:
            found = re.fullmatch(self.form, one, re.ASCII) if isinstance(one, str) else None
            port = found[1] if found else None
            if not found or (port and port.isdecimal() and int(port) > MAX_PORT):
                _refuse(name, one, self.expected)


@attrs.frozen
class Texts:
    """A list of texts, checked by others. On the command line the option is given many times."""

    def __call__(self, name: str, value: Any) -> None:
        """Take the value."""


@attrs.frozen(kw_only=True)
class Setting:
    """The declaration of a field, beside its type and its default.

    Attributes:
        help: what it is, as --help and the docs show it.
        check: refuses values.
        group: heading in --help and in the docs.
        unit: of a number, as "tokens"; "" where there is none.
        unset: what the default None stands for; "" if the default is not None.
        option: its option on the command line; "" for none.
        option_help: as ``help``, where the command line needs other words.
        metavar: placeholder of the option's value.
        unlimited: -1 on the command line is None.
        served: clients of a server set it, under the same name.
        agree: what must have the same value: "ranks" of a run, "instances" that prefill and decode
            for each other.
    """

    help: str
    check: Check
    group: str
    unit: str = ""
    unset: str = ""
    option: str = ""
    option_help: str = ""
    metavar: str | None = None
    unlimited: bool = False
    served: bool = False
    agree: tuple[str, ...] = ()

    @property
    def is_secret(self) -> bool:
        """Whether its value is never shown."""
        return isinstance(self.check, Text) and self.check.secret


def setting(
    default: Any,
    check: Check,
    help: str,
    *,
    group: str,
    option: str | None = None,
    converter: Callable[[Any], Any] | None = None,
    hash: bool | None = None,
    **more: Any,
) -> Any:
    """Declare a field of an attrs class whose annotation says whether it may be None.

    Args:
        default: its default value.
        check: refuses values; not asked about None where the annotation allows it.
        help: what it is.
        group: its heading.
        option: its option on the command line; None: its name with dashes, "": there is no option.
        converter, hash: of attrs.
        more: further attributes of ``Setting``.
    """
    flag = "-" if option is None else option  # its name is not known yet
    about = Setting(help=help, check=check, group=group, option=flag, **more)
    return attrs.field(
        default=default,
        converter=converter,
        validator=_validate,
        hash=hash,
        repr=not about.is_secret,
        metadata={_KEY: about},
    )


def _validate(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None or "None" not in str(attribute.type):
        attribute.metadata[_KEY].check(attribute.name, value)


def settings_of(kind: type[attrs.AttrsInstance]) -> Mapping[str, Setting]:
    """Return the settings of a class by name, in their order."""
    return {each.name: _named(each) for each in attrs.fields(kind) if _KEY in each.metadata}


def _named(attribute: attrs.Attribute[Any]) -> Setting:
    about: Setting = attribute.metadata[_KEY]
    if about.option == "-":
        about = attrs.evolve(about, option="--" + attribute.name.replace("_", "-"))
    return about
