"""The plots: real images, one colour for an algorithm, nothing outside of its figure."""

from __future__ import annotations

import attrs
import pytest

pytest.importorskip("matplotlib")

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

from specplug.bench.plots import COLORS, DPI, PLOTS, STYLE, WIDTH, save
from specplug.bench.summary import legend, tables

FOR_ALL = [name for name in PLOTS if name != "choices.png"]
"""The others are of runs in which several algorithms draft."""

SPEC = "A,B:steps=3,topk=2,tokens=9,B:draft=some/where/else,C"
SECONDS = {
    "NONE": [4.0, 4.2],
    "A": [2.0, 2.6],
    "B:steps=3,topk=2,tokens=9": [1.0, 1.1],
    "B:draft=some/where/else": [1.5, 1.0],
    "C": [6.0, 5.0],
}


@pytest.fixture
def report(make_series, make_report):
    made = make_report(make_series(SPEC, SECONDS), make_series(SPEC, SECONDS, batch_size=8))
    return attrs.evolve(made, settings={**made.settings, "model": f"/{'folder/' * 15}model"})


@pytest.fixture
def figures(report):
    with rc_context(STYLE):
        drawn = {name: PLOTS[name](report) for name in FOR_ALL}
        for figure in drawn.values():
            FigureCanvasAgg(figure).draw()
        yield drawn


def test_they_are_images_of_the_size_that_was_asked_for(report, tmp_path):
    save(report, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(FOR_ALL)
    for file in tmp_path.iterdir():
        image = imread(file)
        assert image.shape[1] == WIDTH * DPI
        assert 500 < image.shape[0] < 2500
        assert 0.02 < (image[..., :3].min(-1) < 0.9).mean() < 0.7, "neither empty nor full"


def test_more_contenders_make_higher_bars_plots(report, make_series, make_report):
    small = make_report(make_series("A", SECONDS))
    for name in ("speedup.png", "time_split.png"):
        assert PLOTS[name](small).get_figheight() < PLOTS[name](report).get_figheight() / 2


def rgb(color):
    return tuple(round(channel, 9) for channel in to_rgb(color))


def bar_colors(figure):
    return [
        {rgb(patch.get_facecolor()) for patch in axes.patches if patch.get_width()}
        for axes in figure.axes
    ]


def test_an_algorithm_has_one_colour_everywhere(figures):
    expected = {rgb(color) for color in COLORS[:4]}
    for colors in bar_colors(figures["speedup.png"]):
        assert colors == {*expected, rgb("#6E6E6E")}
    lines = [line for axes in figures["acceptance.png"].axes for line in axes.get_lines()]
    by_label = {line.get_label(): rgb(line.get_color()) for line in lines}
    assert len(lines) == 8
    assert set(by_label.values()) == expected
    assert len({line.get_marker() for line in lines}) == 4
    bars = figures["speedup.png"].axes[0]
    rows = [label.get_text().strip() for label in bars.get_yticklabels()]
    assert rows == ["NONE", "B", "B", "A", "C"], "the fastest first, under the baseline"
    assert rgb(bars.patches[3].get_facecolor()) == by_label["A"]
    for colors in bar_colors(figures["time_split.png"]):
        assert expected < colors
    for axes in figures["reliability.png"].axes:
        diagonal, *lines = axes.get_lines()
        assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
        assert {line.get_label(): rgb(line.get_color()) for line in lines} == by_label
        assert list(lines[0].get_xdata()) == pytest.approx([0.125, 0.475, 0.975])
        assert list(lines[0].get_ydata()) == pytest.approx([0.25, 0.5, 1.0])


def test_two_of_one_algorithm_are_told_apart(figures):
    labels = [text.get_text() for text in figures["acceptance.png"].legends[0].get_texts()]
    assert sorted(labels) == ["A", "B\nS 3 · K 1 · N 4", "B\nelse · S 3 · K 1 · N 4", "C"]


@pytest.mark.parametrize("name", FOR_ALL)
def test_axes_have_units_and_no_text_is_cut_off(figures, name):
    figure = figures[name]
    assert any(
        word in figure.axes[-1].get_xlabel()
        for word in ("median", "(ms", "position", "(share", "nodes")
    )
    assert "/model, float32, on a processor" in figure.get_supxlabel().replace("\n", " ")
    ticks = {label for axes in figure.axes for label in axes.get_xticklabels()}  # some not drawn
    for text in set(figure.findobj(Text)) - ticks:
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert box.x0 >= -1, text
            assert box.y0 >= -1, text
            assert box.x1 <= figure.bbox.width + 1, text
            assert box.y1 <= figure.bbox.height + 1, text


def test_round_that_is_not_drawn_widens_no_axis(make_series, make_report):
    limits = []
    for best in (1.9, 0.1):
        seconds = {"NONE": [4.0] * 8, "A": [best, *[2.0] * 7]}
        with rc_context(STYLE):
            figure = PLOTS["speedup.png"](make_report(make_series("A", seconds)))
        limits.append(figure.axes[0].get_xlim()[1])
    assert limits[0] == limits[1]
    assert 2.0 < limits[0] < 3.0


def test_the_whole_bar_is_the_time_a_token_takes(figures, report):
    axes = figures["time_split.png"].axes[0]
    none = report.summaries[0]
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches if patch.get_y() < 0]
    assert max(ends) == pytest.approx(1000 * none.time.wall / none.output_tokens)


def test_the_baseline_alone(make_series, make_report, tmp_path):
    save(make_report(make_series("NONE", {"NONE": [1.0]})), tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"speedup.png", "acceptance.png", "time_split.png"}


def test_parts_of_a_step_that_no_engine_knows_are_not_shown(make_series, make_report, tmp_path):
    known = make_series("A", {"NONE": [4.0], "A": [2.0]})
    for series in known:
        for run in series.runs:
            run.statistics.update(seconds={}, prefill_seconds=0.0)
    report = make_report(known)
    expected = ["speedup.png", "acceptance.png", "nodes.png", "reliability.png"]
    assert save(report, tmp_path) == expected
    assert {file.name for file in tmp_path.iterdir()} == set(expected)
    assert not any("propose" in table.columns for table in tables(report))
    assert "propose" not in " ".join(legend(report))


def test_marks_are_as_large_as_drafts_are_many(figures):
    (sizes, *_) = [each.get_sizes() for each in figures["acceptance.png"].axes[0].collections]
    assert list(sizes / sizes[0]) == pytest.approx([1.0, 0.8, 0.4])


def test_nodes_of_a_step_add_up_to_what_was_drafted(figures, report):
    axes = figures["nodes.png"].axes[0]
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
    assert max(ends) == pytest.approx(report.summaries[1].proposed_nodes)
    said = [text.get_text() for text in axes.texts]
    assert "2.10 of 5.40" in said
    assert "1.00 of 1.00" in said


def test_ten_algorithms_have_ten_colours_and_marks(make_series, make_report):
    names = [f"ALGORITHM_{letter}" for letter in "ABCDEFGHIJ"]
    seconds = {"NONE": [4.0], **{name: [2.0] for name in names}}
    drawn = PLOTS["acceptance.png"](make_report(make_series(",".join(names), seconds)))
    lines = drawn.axes[0].get_lines()
    assert len({rgb(line.get_color()) for line in lines}) == len(names)
    assert len({line.get_marker() for line in lines}) == len(names)


def test_choices_are_stacked_shares_of_each_step(make_series, make_report, tmp_path):
    seconds = {"NONE": [4.0, 4.0], "[A,B]": [2.0, 2.0], "A": [3.0, 3.0]}
    report = make_report(make_series("[A,B],A", seconds))
    assert "choices.png" in save(report, tmp_path)
    assert imread(tmp_path / "choices.png").shape[1] == WIDTH * DPI
    with rc_context(STYLE):
        shares, nodes = PLOTS["choices.png"](report).axes
    assert shares.get_title(loc="left") == "[A,B], batch size 1: NONE 60 %, A 40 %"
    drawn = {each.get_label(): each.get_data() for each in shares.patches}
    assert {name: list(data.values) for name, data in drawn.items()} == {
        "A": [0.0, 0.5],
        "NONE": [1.0, 1.0],
    }
    assert list(drawn["NONE"].baseline) == [0.0, 0.5]
    assert list(drawn["A"].edges) == [1, 2, 3]
    means = {each.get_label(): list(each.get_data().values) for each in nodes.patches}
    assert means == {"verified": [1.0, 2.5], "accepted": [1.0, 2.0]}


def test_choices_with_expectations_draw_them(make_series, make_report):
    series = make_series("auto", {"NONE": [4.0], "auto": [2.0]})
    statistics = series[1].runs[0].statistics
    statistics["choices"] = [
        {**step, "expected": expected, "reason": ""}
        for step, expected in zip(statistics["choices"], (2.0, 3.0), strict=True)
    ]
    _, nodes = PLOTS["choices.png"](make_report(series)).axes
    means = {each.get_label(): list(each.get_data().values) for each in nodes.patches}
    assert means["expected"] == [1.0, 1.5]


def test_choices_of_many_steps_are_put_together(make_series, make_report):
    seconds = {"NONE": [4.0], "auto": [2.0]}
    series = make_series("auto", seconds)
    steps = series[1].runs[0].statistics["choices"]
    series[1].runs[0].statistics["choices"] = steps * 200
    shares, _ = PLOTS["choices.png"](make_report(series)).axes
    data = shares.patches[0].get_data()
    assert len(data.values) == 134
    assert (data.edges[0], data.edges[1], data.edges[-1]) == (1, 4, 401)
