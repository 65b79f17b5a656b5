"""The measurement of the router runs and its figures are those of real traffic."""

from __future__ import annotations

from serve.router.bench import measure


async def test_the_bench_measures_all_ways():
    figures = await measure(rounds=20, streams=4, tokens=50, repeats=1, loop_s=0.2)
    assert figures["two_hops"]["router"]["ttft_ms"] > figures["two_hops"]["direct"]["ttft_ms"] > 0
    assert (
        figures["streaming"]["router"]["cpu_us_per_token"] > 0 and figures["streaming"]["relay"]["cpu_us_per_token"] > 0
    )
    # 44 ms would be Nagle with delayed acknowledgements; the rest is room for a busy machine
    assert figures["two_hops"]["router"]["added_ttft_ms"] < 30
    assert all(figures["requests_per_s"][way] > 0 for way in ("direct", "relay", "router"))
