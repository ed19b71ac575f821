"""All stop strings are found in one pass, whatever they and the text are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.engine.stop_strings import StopStrings, stop_strings

exactly = settings(max_examples=300, deadline=None, derandomize=True, database=None)
SHORT = st.text(alphabet="ab", min_size=1, max_size=5)


@exactly
@given(text=st.text(alphabet="abc", max_size=25), strings=st.lists(SHORT, max_size=6))
def test_each_state_is_what_a_plain_search_finds(text: str, strings: list[str]) -> None:
    stop, state = StopStrings(strings), 0
    for end, character in enumerate(text, 1):
        state = stop.step(state, character)
        so_far = text[:end]
        beginnings = (s[:n] for s in strings for n in range(len(s) + 1))
        longest = max((b for b in beginnings if so_far.endswith(b)), key=len, default="")
        assert stop.depth[state] == len(longest)
        matches = [s for s in strings if so_far.endswith(s)]
        assert stop.found[state] == (max(matches, key=len) if matches else None)


def test_a_character_takes_constant_time_on_average() -> None:
    """The worst text: it always nearly matches, and each string's end is another's middle."""
    looked_up = 0

    class Counting(str):
        def __hash__(self) -> int:
            nonlocal looked_up
            looked_up += 1
            return super().__hash__()

    stop = StopStrings([("a" * n) + "b" for n in range(190, 254)])
    state, text = 0, ("a" * 180 + "c") * 20
    for character in text:
        state = stop.step(state, Counting(character))
    assert looked_up <= 3 * len(text), "two look-ups a character, and one a shorter state"


def test_choices_share_their_stop_strings() -> None:
    assert stop_strings(("a", "b")) is stop_strings(("a", "b"))
    assert stop_strings(()) is None
