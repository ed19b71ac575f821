"""What ``exact.tokens`` tells where tokens differ."""

from __future__ import annotations

import pytest
from mutants import MUTANTS

from specplug.testing import Failure, Subject, exactness
from specplug.testing.configuration import Configuration
from specplug.testing.laboratory import Laboratory


def test_differing_tokens_name_where_states_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin can make a token wrong, so the token is made up; the states do part in chunks."""

    def differs(laboratory: Laboratory, configuration: Configuration) -> str:
        return "prompt 0, token 3: 5; expected 7" if configuration["chunk"] else ""

    monkeypatch.setattr(exactness, "difference", differs)
    (mutant,) = (each for each in MUTANTS if each.name == "chunk tail")
    with pytest.raises(Failure) as raised:
        exactness.tokens.run(Laboratory(Subject(algorithm=mutant.make(), settings=mutant.settings)))
    told = str(raised.value)
    assert told.startswith("chunk=")
    assert "prompt 0, token 3: 5; expected 7" in told
    assert "States part after build_draft_input" in told
