"""The guard: when it acts, and that people hear of it once an episode."""

from __future__ import annotations

from core.runtime.guard import Guard, News


class Run:
    """A guard, and a report every half a second of steps that last 50 ms."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.now = 0.0
        self.news: list[News] = []
        self.pauses, self.held_s = 0, 0.0

    def steps(self, count: int, gap_ms: float, *, stale: str = "", job: bool = True) -> None:
        for _ in range(count):
            self.now += 0.05
            self.guard.see(self.now, gap_ms, 40.0, stale)
            if round(self.now / 0.05) % 10 == 0:
                pauses, held_s = self.guard.take(self.now)
                self.pauses, self.held_s = self.pauses + pauses, self.held_s + held_s
                if (news := self.guard.news(self.now, pauses, held_s, job=job)) is not None:
                    self.news.append(news)


def test_it_acts_at_four_gaps_in_twenty_and_lets_go_after_forty_that_held() -> None:
    run = Run()
    run.steps(20, 30.0)
    run.steps(3, 50.0)
    assert run.guard.reason == ""
    run.steps(1, 50.0)
    assert run.guard.reason.startswith("gaps over 40 ms: 4 of the last 20 steps")
    run.steps(39, 30.0)
    assert run.guard.reason != ""
    run.steps(1, 30.0)
    assert run.guard.reason == ""


def test_an_episode_is_told_at_its_beginning_and_its_end() -> None:
    run = Run()
    run.steps(20, 30.0)
    run.steps(4, 50.0)
    run.steps(200, 30.0)
    assert [(news.level, news.code) for news in run.news] == [("warning", "guard"), ("info", "guard_lifted")]
    assert "gaps over 40 ms" in run.news[0].text
    assert run.news[1].text == "finetuning goes on: it stood still once, 2.0 s in all"
    assert (run.pauses, round(run.held_s, 3)) == (1, 2.0)


def test_pauses_in_a_row_are_one_episode() -> None:
    run = Run()
    for _ in range(5):
        run.steps(20, 50.0)
        run.steps(45, 30.0)
    run.steps(150, 30.0)
    assert [news.code for news in run.news] == ["guard", "guard_lifted"]
    assert "5 times" in run.news[1].text


def test_a_predictor_that_does_not_trust_itself_is_told_too() -> None:
    run = Run()
    run.steps(20, 30.0, stale="the clock changed")
    assert run.news == [News("warning", "guard", "finetuning paused: the clock changed")]
    assert run.guard.reason == "", "the policy itself pauses then"


def test_without_a_job_nothing_stands_still() -> None:
    run = Run()
    run.steps(40, 50.0, job=False)
    assert run.news == []


def test_gaps_without_a_target_are_no_misses() -> None:
    guard = Guard()
    for step in range(40):
        guard.see(step * 0.05, 500.0, None, "")
        guard.see(step * 0.05, None, 40.0, "")
    assert guard.reason == ""
