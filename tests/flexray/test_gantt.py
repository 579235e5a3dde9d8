import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from flexray.gantt import _COLOURS, _FIXED, _IDLE, _runs, degree_colour, draw_step
from flexray.solver.cluster import Cluster
from flexray.solver.plan import Group, MicroStep, Plan

PLAN = Plan(
    (
        MicroStep((Group(4, (0, 1, 2, 3), (0,), (4000,), 60.0),), 70.0),
        MicroStep(
            (
                Group(2, (0, 2), (1, 2), (900, 800), 20.0),
                Group(1, (1,), (3,), (500,), 10.0),
            ),
            30.0,
        ),
    ),
    planned_ms=100.0,
    lower_bound_ms=95.0,
    solve_s=0.1,
    method="search",
)
CLUSTER = Cluster((2, 2))
# Rank-milliseconds of each colour. A bar leaves 0.12 of a rank to the colour of idle time; in the
# second micro-step rank 3 idles, and rank 1 for half of it.
AREAS = {
    _COLOURS[2]: (4 - 0.12) * 60,
    _COLOURS[1]: 2 * (1 - 0.12) * 20,
    _COLOURS[0]: (1 - 0.12) * 10,
    _IDLE: 20 + 10 + 0.12 * (60 + 2 * 20 + 10),
    _FIXED: 4 * (10 + 10),
}


def share(image, colour):
    return np.all(np.abs(image[:, :, :3] - to_rgb(colour)) < 0.004, axis=2).mean()


def test_areas_are_ranks_times_milliseconds(tmp_path):
    draw_step(PLAN, CLUSTER, tmp_path / "plan.png")
    image = imread(tmp_path / "plan.png")
    unit = share(image, _FIXED) / AREAS[_FIXED]
    for colour, area in AREAS.items():
        assert share(image, colour) / unit == pytest.approx(area, rel=0.15), colour


def test_measured_ends_are_marked(tmp_path):
    def black(name, **options):
        draw_step(PLAN, CLUSTER, tmp_path / name, **options)
        return share(imread(tmp_path / name), "black")

    without = black("without.png")
    one = black("one.png", measured=[[65.0], [22.0, 1e6]])  # the last one is off the picture
    both = black("both.png", measured=[[65.0], [22.0, 12.0]])
    assert without < one < both


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_same_plan_gives_the_same_file(tmp_path, ending):
    paths = [tmp_path / f"{name}.{ending}" for name in "ab"]
    for path in paths:
        draw_step(PLAN, CLUSTER, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_an_empty_plan_can_be_drawn(tmp_path):
    draw_step(Plan((), 0.0, 0.0, 0.0, "search"), CLUSTER, tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").stat().st_size > 0


def test_runs_of_ranks():
    assert _runs((0, 1, 3, 6, 7)) == [(0, 2), (3, 1), (6, 2)]


def test_every_degree_has_a_colour():
    assert len({degree_colour(2**power) for power in range(8)}) == 8
    assert degree_colour(3) == degree_colour(2)
    assert degree_colour(1024) == _COLOURS[-1]
