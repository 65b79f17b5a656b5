"""Acceptance lengths come from files, or not at all."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.curve import CURVES
from runners.golden import GoldenError, lookup, position_rates, read_curve


def test_glm52_depth_three_is_the_published_length() -> None:
    found = lookup("glm5.2", "mtp", "thinking-on", 3)
    assert (found.curve, found.target_length, found.provisional) == ("glm5.2_mtp", 2.99, False)


def test_glm53_is_provisional() -> None:
    assert lookup("glm5.3", "mtp", "thinking-on", 3).provisional


@pytest.mark.parametrize(
    ("model", "thinking", "depth", "message"),
    [
        ("glm5.1", "thinking-on", 3, "no acceptance curve"),
        ("glm5.2", "thinking-off", 3, "no thinking-off curve"),
        ("glm5.3", "thinking-on", 4, "no thinking-on length for draft depth 4"),
    ],
)
def test_a_missing_cell_is_an_error_that_names_it(model: str, thinking: str, depth: int, message: str) -> None:
    with pytest.raises(GoldenError, match=message):
        lookup(model, "mtp", thinking, depth)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", sorted(CURVES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_curve_reads(path: Path) -> None:
    assert read_curve(path).curves


def test_a_length_beyond_the_depth_is_refused(tmp_path: Path) -> None:
    text = (CURVES / "glm5.3_mtp.yaml").read_text().replace("{3: 2.99}", "{3: 4.01}")
    (tmp_path / "glm5.3_mtp.yaml").write_text(text)
    with pytest.raises(GoldenError, match="not within"):
        read_curve(tmp_path / "glm5.3_mtp.yaml")


@given(st.integers(1, 8).flatmap(lambda k: st.tuples(st.just(k), st.floats(1, k + 1))))
def test_position_rates_add_up_to_the_target(case: tuple[int, float]) -> None:
    depth, target = case
    rates = position_rates(target, depth)
    assert len(rates) == depth
    assert 1 + sum(rates) == pytest.approx(target, abs=1e-9)
    assert list(rates) == sorted(rates, reverse=True)
