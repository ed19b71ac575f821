"""``specplug new NAME --kind KIND``: a package of an algorithm, made from a template.

copier renders the template and merges what a later version of it has changed. All its versions are
in the package: ``templates/algorithm/v1``, and so on.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from specplug import __version__
from specplug.errors import SpecplugError, UsageError
from specplug.registry import Registry

TEMPLATES = Path(__file__).parent / "templates" / "algorithm"
"""A folder for each version of the template. One that was released does not change any more."""

REPOSITORY = "~/.cache/specplug/algorithm_template"
"""Where copier finds all versions as a git repository, whose commits have their names."""

ANSWERS = ".copier-answers.yml"

KINDS = {
    "ngram": "no model: what followed the same tokens before",
    "heads": "heads on the target's last hidden state",
    "feature": "a small network over the target's hidden states, token by token",
    "model": "a language model",
    "block": "one pass of a small network drafts a block",
    "self": "the target's own first layers",
}
"""What drafts -> in words."""

UNTRAINED = ("heads", "feature", "block")
"""The kinds whose network is not trained, so that hardly a draft is right."""


@click.command(
    epilog="What drafts: " + "; ".join(f"{kind}: {words}" for kind, words in KINDS.items()) + "."
)
@click.argument("name", required=False)
@click.option("--kind", type=click.Choice(list(KINDS)), help="What drafts.")
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The folder to make; specplug-NAME here if not given.",
)
@click.option("--force", is_flag=True, help="Write over the files of a folder that is there.")
@click.option(
    "--update",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="FOLDER",
    help="Make no package: merge into this one what the template has that is new.",
)
def new(
    name: str | None, kind: str | None, path: Path | None, force: bool, update: Path | None
) -> None:
    """Make a package of an algorithm NAME, which runs on the default model and passes its tests.

    docs/new.md goes on from there.
    """
    if update is not None:
        if name or kind or path or force:
            raise UsageError("--update takes a package as it is; expected no other argument")
        click.echo(_update(update))
        return
    if name is None or kind is None:
        raise UsageError(
            f"NAME is {name}, --kind is {kind}; expected both, such as: specplug new MY_DRAFTER "
            "--kind ngram (specplug new --help)"
        )
    name = name.upper()
    _check_name(name)
    folder = Path(f"specplug-{name.lower().replace('_', '-')}") if path is None else path
    if not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is there already; expected no such folder, or an empty one; give another by "
            "--path, or --force to write over its files"
        )
    _make(folder, name, kind)
    place = shlex.quote(str(folder if folder.is_absolute() else f"./{folder}"))
    click.echo(f"made {name} in {folder}; its drafter is specplug_{name.lower()}/worker.py. Next:")
    click.echo(f"    pip install -e {place}")
    untrained = "  # gold.acceptance fails until the network is trained"
    click.echo(f"    specplug check {name}{untrained if kind in UNTRAINED else ''}")
    click.echo(f"    specplug bench --speculative-algorithms {name}")


def _check_name(name: str) -> None:
    """Refuse a name that is none, or that something installed has."""
    if not (name.isascii() and name.isidentifier() and name[0].isalpha()):
        raise UsageError(
            f"NAME {name!r}: expected letters, digits and underscores, a letter first, such as "
            "MY_DRAFTER"
        )
    for entry in Registry().entries():
        if entry.name == name:
            raise UsageError(
                f"NAME {name!r}: {entry.subject} is installed; expected a name that no installed "
                "algorithm has (specplug list); choose another"
            )
    package = f"specplug_{name.lower()}"
    if find_spec(package) is not None:
        raise UsageError(
            f"NAME {name!r}: a package {package} is installed; expected a name whose package is "
            "new; choose another"
        )


def _versions() -> list[Path]:
    """Return the template's versions, the oldest first."""
    return sorted(TEMPLATES.glob("v*"), key=lambda folder: int(folder.name[1:]))


def _range() -> str:
    """Return the versions of specplug for which a package is made."""
    major, minor = map(int, __version__.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"


def _copier() -> Any:
    """Return the library.

    Raises:
        SpecplugError: it is not installed.
    """
    try:
        import copier
    except ImportError as error:
        raise SpecplugError(
            f"specplug new needs copier: {error}; expected it to be installed: "
            "pip install 'specplug[new]'"
        ) from error
    return copier


def _make(folder: Path, name: str, kind: str) -> None:
    """Write a package's files to a folder, over those that are there."""
    answers = {"name": name, "kind": kind, "specplug_range": _range()}
    _copier().run_copy(
        str(_versions()[-1]), folder, answers, defaults=True, overwrite=True, quiet=True
    )


def _update(folder: Path) -> str:
    """Merge into a package what the template has that is new. Return what was done.

    Raises:
        UsageError: it was not made by ``specplug new``, or git has no commit of its files.
    """
    copier = _copier()
    if not (folder / ANSWERS).is_file():
        raise UsageError(
            f"{folder} has no {ANSWERS}; expected a package that was made by specplug new"
        )
    _publish_versions()
    try:
        copier.run_update(
            folder,
            {"specplug_range": _range()},
            defaults=True,
            overwrite=True,
            quiet=True,
        )
    except copier.errors.UserMessageError as error:
        raise UsageError(
            f"{folder}: {error} Expected all of it in a commit of git, so that what is merged can "
            "be seen, and undone: git add -A && git commit"
        ) from error
    return f"{folder} has the template's {_versions()[-1].name}; git diff shows what was merged"


def _publish_versions() -> None:
    """Make the git repository that copier reads: a commit and a tag for each version."""
    place = Path(REPOSITORY).expanduser()
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.parent) as staging:
        made = Path(staging) / "made"
        _git("init", "--quiet", "--template=", str(made))
        for version in _versions():
            for old in made.iterdir():
                if old.name != ".git":
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            shutil.copytree(version, made, dirs_exist_ok=True)
            _git("-C", str(made), "add", "--all", "--force")
            _git("-C", str(made), "commit", "--quiet", "--message", version.name)
            _git("-C", str(made), "tag", version.name)
        if place.exists():
            place.rename(Path(staging) / "old")
        made.rename(place)


def _git(*arguments: str) -> None:
    """Run git as nobody in particular.

    Raises:
        SpecplugError: it is not installed, or fails.
    """
    settings = ("user.name=specplug", "user.email=", "commit.gpgsign=false", "core.autocrlf=false")
    options = [word for each in settings for word in ("-c", each)]
    try:
        subprocess.run(["git", *options, *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SpecplugError("--update needs git, which is not on the PATH; install it") from error
    except subprocess.CalledProcessError as error:
        raise SpecplugError(f"git {arguments[0]} failed: {error.stderr.strip()}") from error
