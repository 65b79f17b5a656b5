"""``make bench``: performance as ratios, each taken side by side in one run. Prints one JSON object.

The default recipe is served as a sweep serves it, but for vLLM's OpenMP threads, which are left as vLLM has them: it is
compared at its best. The same client asks vLLM and the whole path in turn:

* decode: output tokens/s of the bundled decode server over vLLM's, at batch 1 and 8, same dtype and prompts;
* ttft: time to first token through router and hand-off over vLLM's own, 512-token prompts;
* router: what the router adds to a request and to a token (serve.router.bench);
* handoff: GiB/s of a hand-off over a bare transport write of the same bytes (serve.handoff.bench).

Absolute figures are those of this machine and of what else it does; the ratios are what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from configs.job import JobSpec, ProcessSpec
from configs.load import load_matrix
from runners import warden, weights
from runners.bindings import REPO, bind_local
from runners.events import EventLog
from runners.expand import expand
from runners.roles import Roles

ENTRY = "smollm2-135m-fp32-cpu-vllm-baton"
REQUEST_TIMEOUT_S = 300.0
CHILD_TIMEOUT_S = 300.0
# With 64 the first of eight streams had ended before the last one's prompt was computed.
DECODE_TOKENS = 160
VLLM, PATH = "vllm", "baton"


class Stream:
    """Arrival times of one streamed answer's tokens, in seconds of the event loop's clock."""

    def __init__(self, sent_s: float, arrivals_s: list[float]) -> None:
        self.ttft_s = arrivals_s[0] - sent_s
        self.arrivals_s = arrivals_s


async def stream(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], max_tokens: int) -> Stream:
    """One greedy request that ignores EOS. Raises RuntimeError when it does not bring ``max_tokens`` tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    arrivals: list[float] = []
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                event = orjson.loads(line[6:])
                for choice in event.get("choices", []):
                    arrivals += [now] * len(choice.get("token_ids") or ())
    if len(arrivals) != max_tokens:
        raise RuntimeError(f"{url} sent {len(arrivals)} tokens, not {max_tokens}")
    return Stream(sent, arrivals)


def steady_rate(streams: Sequence[Stream]) -> float:
    """Tokens/s over the span in which all streams decode: from the last first token to the first last one."""
    begin = max(one.arrivals_s[0] for one in streams)
    end = min(one.arrivals_s[-1] for one in streams)
    if end <= begin:
        raise RuntimeError("the streams do not overlap: more output tokens are needed")
    return sum(begin < at <= end for one in streams for at in one.arrivals_s) / (end - begin)


def paired(samples: dict[str, list[float]], better: Callable[[float, float], float]) -> dict[str, Any]:
    """Medians of both ways and of the ratio round by round."""
    ratios = [better(ours, own) for ours, own in zip(samples[PATH], samples[VLLM], strict=True)]
    return {
        PATH: round(statistics.median(samples[PATH]), 5),
        VLLM: round(statistics.median(samples[VLLM]), 5),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "rounds": len(ratios),
    }


class Bench:
    """The measurements against one running stack."""

    def __init__(self, spec: JobSpec, session: aiohttp.ClientSession, seed: int) -> None:
        prefill = next(process.name for process in spec.processes if process.role == "prefill")
        self._model = spec.model_id
        self._urls = {PATH: spec.router_url(), VLLM: spec.resolve(f"http://@host:{prefill}@:@port:{prefill}:http@")}
        self._session = session
        self._draw = random.Random(seed)

    async def decode(self, batch: int, rounds: int, max_tokens: int) -> dict[str, Any]:
        """Steady output tokens/s of ``batch`` streams, vLLM and the bundled decode in turn."""
        samples: dict[str, list[float]] = {PATH: [], VLLM: []}
        for index in range(rounds + 1):
            for way in (VLLM, PATH):
                rate = steady_rate(await self._ask(way, batch, 32, max_tokens))
                if index:  # the first round warms both up
                    samples[way].append(rate)
        return {"batch": batch, "unit": "tokens/s", **paired(samples, lambda ours, own: ours / own)}

    async def ttft(self, tokens: int, rounds: int) -> dict[str, Any]:
        """Seconds to the first token of one request, no two prompts alike."""
        samples: dict[str, list[float]] = {PATH: [], VLLM: []}
        for index in range(rounds + 1):
            for way in (VLLM, PATH):
                (one,) = await self._ask(way, 1, tokens, 2)
                if index:
                    samples[way].append(one.ttft_s)
        return {"prompt_tokens": tokens, "unit": "s", **paired(samples, lambda ours, own: ours / own)}

    async def _ask(self, way: str, batch: int, tokens: int, max_tokens: int) -> list[Stream]:
        prompts = [[self._draw.randrange(1000, 40000) for _ in range(tokens)] for _ in range(batch)]
        asked = (stream(self._session, self._urls[way], self._model, prompt, max_tokens) for prompt in prompts)
        return list(await asyncio.gather(*asked))


def recipe(dtype: str, folder: Path) -> JobSpec:
    """The default entry, or the same in another dtype, bound to this machine."""
    text = (REPO / "configs" / "local.yaml").read_text()
    matrix = folder / "local.yaml"
    matrix.write_text(text.replace("dtype: float32", f"dtype: {dtype}"))
    (spec, *_) = expand(load_matrix(matrix), only=(ENTRY,))
    return bind_local(
        spec.model_copy(update={"processes": tuple(map(_at_its_best, spec.processes))}),
        run_id="bench",
        job_id=dtype,
        run_dir=folder,
        model_dir=weights.model_dir(spec),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _at_its_best(process: ProcessSpec) -> ProcessSpec:
    """vLLM as it is served alone: made to share cores it decodes 23.9 tokens/s, not 28.8 (2-core EPYC, 2026-11-29)."""
    kept = {name: value for name, value in process.env.items() if name != "GOMP_SPINCOUNT"}
    return process.model_copy(update={"env": kept}) if process.engine == "vllm" else process


async def serve_and_measure(dtype: str, quick: bool, seed: int) -> dict[str, Any]:
    """Starts the stack, measures, stops it."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        spec = recipe(dtype, Path(name))
        (spec.job_dir() / "logs").mkdir(parents=True)
        (spec.job_dir() / "stages").mkdir(exist_ok=True)
        with EventLog(spec.job_dir() / "events.jsonl", job=dtype) as events:
            roles = Roles(spec, events, lambda role: print(f"bench: {role} ended", file=sys.stderr))
            try:
                await weights.stage(spec)
                await roles.start()
                await roles.wait_ready()
                timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
                async with aiohttp.ClientSession(timeout=timeout) as session:
                    bench = Bench(spec, session, seed)
                    return {
                        "versions": spec.versions,
                        "decode": [await bench.decode(batch, 2 if quick else 5, DECODE_TOKENS) for batch in (1, 8)],
                        "ttft": await bench.ttft(512, 2 if quick else 7),
                    }
            finally:
                await roles.stop()


async def child(*argv: str) -> Any:
    """Runs ``python -m ...`` and reads the JSON it prints. Raises RuntimeError with its last words."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=REPO
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), CHILD_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        raise RuntimeError(f"{' '.join(argv)} took more than {CHILD_TIMEOUT_S:g} s") from None
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {err.decode()[-1000:]}")
    return json.loads(out)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for, one after the other: two measurements at once would disturb each other."""
    result: dict[str, Any] = {"at": datetime.now(UTC).isoformat(timespec="seconds")}
    if "handoff" in arguments.parts:
        result["handoff"] = await child("serve.handoff.bench", "--mib", "64")
    if "router" in arguments.parts:
        result["router"] = await child("serve.router.bench")
    for dtype in arguments.dtypes if "stack" in arguments.parts else ():
        result[dtype] = await serve_and_measure(dtype, arguments.quick, arguments.seed)
    return result


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 75 when a measurement could not be made."""
    parser = argparse.ArgumentParser(prog="python -m runners.bench", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--parts", nargs="+", default=["handoff", "router", "stack"], choices=["handoff", "router", "stack"]
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    arguments = parser.parse_args(argv)
    warden.become_subreaper()
    try:
        result = asyncio.run(run(arguments))
    except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 75
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
