"""Times of a plan: what they follow, and when a reader is warned."""

from __future__ import annotations

import pytest

from configs.job import JobSpec
from configs.load import load_matrix
from runners.estimate import duration, estimate, limit_s
from runners.expand import expand
from runners.plan import notes, render
from tests.configs.recipes import CONFIGS


@pytest.fixture(scope="module")
def jobs() -> list[JobSpec]:
    matrix = load_matrix(CONFIGS / "amd.yaml")
    return list(expand(matrix, only=["*vllm-tilert"], version_of=lambda _: "1"))


def test_every_phase_is_at_most_its_deadline(jobs: list[JobSpec]) -> None:
    for job in jobs:
        times = estimate(job)
        assert times.about.keys() == times.at_most.keys()
        assert all(0 <= times.about[phase] <= times.at_most[phase] for phase in times.about)
        assert times.at_most["start"] == 3600 + 300, "the slowest worker, then the router"


def test_a_replay_takes_its_duration_and_its_warm_up(jobs: list[JobSpec]) -> None:
    (replay,) = jobs[1].points
    longer = replay.model_copy(update={"duration_s": replay.duration_s + 1000})
    times = [estimate(jobs[1].model_copy(update={"points": (point,)})).about[replay.id] for point in (replay, longer)]
    assert times[0] > 3600 and times[1] - times[0] == 1000


def test_conversion_and_weights_follow_the_checkpoints_size(jobs: list[JobSpec]) -> None:
    times = estimate(jobs[0])
    weights = {**jobs[0].model_profile["weights"], "manifest": {"size-gib": 352, "files": None, "shards": None}}
    halved = estimate(jobs[0].model_copy(update={"model_profile": {**jobs[0].model_profile, "weights": weights}}))
    assert times.about["prepare"] - halved.about["prepare"] == 352 / 0.5
    assert times.about["start"] - halved.about["start"] == 352 / 2.0


def test_a_site_that_gives_too_little_time_is_noted(jobs: list[JobSpec]) -> None:
    job = jobs[0]
    assert limit_s(job) == 480 * 60 and "480 min" not in render(job) and "8 h 00 min, the site's" in render(job)
    assert not [note for note in notes(job) if "split" in note]
    slurm = job.cluster_profile["slurm"] | {"time-limit-min": 30}
    short = job.model_copy(update={"cluster_profile": job.cluster_profile | {"slurm": slurm}})
    assert [note for note in notes(short) if "the site gives a job 30 min: split the entry" in note]


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (0.4, 119, 120, 3600, 7200, 36360)] == [
        *("0 s", "119 s", "2 min", "60 min", "2 h 00 min", "10 h 06 min")
    ]
