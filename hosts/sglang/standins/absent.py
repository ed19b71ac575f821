"""Names of a package that is not there: importable, and an error when one of them is called.

SGLang imports its GPU kernels and torchvision at module level, and on the CPU calls few of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence


class _AbsentType(type):
    """The metaclass of a class that can be imported, subclassed and read, but not used."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__module__}.{cls.__name__}", name)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__name__} is a stand-in; this run needs the real package"
        )


def absent(module: str, name: str) -> _AbsentType:
    """Return what stands for ``module.name``: a class without instances.

    Raises:
        AttributeError: it is one of Python's own names.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return _AbsentType(name, (), {"__module__": module})


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        return absent(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of one package, except those that are files."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_for_submodules(package: str) -> None:
    """Let every submodule of ``package`` be imported."""
    sys.meta_path.append(_Finder(package))
