"""Runs the benchmarks in turns, several rounds, and shows the median and the spread of each measurement."""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import machine
import report
from suite import BENCHMARKS

EXAMPLES = """examples:
  ./bazelw run //benchmarks:all -- --quick                       one short round, to see that all run
  ./bazelw run //benchmarks:all -- --only memory,two_d_step      some of them
  PEER_PYTHON=$(./bazelw info output_base)/external/peer_python/python ./bazelw run //benchmarks:all
                                                                 with PyTorch's numbers and the ratio to them
  ./bazelw run //benchmarks:all -- --from benchmark_results/performance.json
                                                                 shows an earlier run again

A round takes some five minutes on two cores. Keep the machine quiet meanwhile: the results tell how much CPU time other
programs took. After each round they are in performance.json, with the values of each round, and performance.svg has the
ratios to PyTorch as a chart. A benchmark that fails is not run again; its message is shown at the end and the exit
status is 1."""


class BenchmarkError(Exception):
    """A benchmark that failed; its text is for the user."""


def parse_arguments(arguments):
    names = [benchmark.name for benchmark in BENCHMARKS]

    def subset(text):
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
        return chosen

    def positive(text):
        if not text.isdigit() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
        return int(text)

    parser = argparse.ArgumentParser(
        prog="./bazelw run //benchmarks:all --",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="how often each runs (default: 5)")
    parser.add_argument("--only", type=subset, default=names, metavar="NAME,...", help="these: " + ", ".join(names))
    parser.add_argument("--out", metavar="DIR", default="benchmark_results", help="for files (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, in which each measures once; times are rough")
    parser.add_argument("--timeout", type=positive, default=900, metavar="S", help="seconds that one may take (900)")
    parser.add_argument("--from", dest="source", metavar="JSON", help="show these results in place of running")
    parser.add_argument("--write-docs", action="store_true", help="also write docs/performance.{json,md,svg}")
    options = parser.parse_args(arguments)
    if options.write_docs and not options.source and (options.quick or options.only != names):
        parser.error("--write-docs: goes with all benchmarks, without --quick and --only")
    if options.write_docs and "BUILD_WORKSPACE_DIRECTORY" not in os.environ:
        parser.error("--write-docs: needs `bazel run`, which says where the sources are")
    options.rounds = 1 if options.quick else options.rounds
    return options


def from_caller(path):
    """`path` as the user meant it: `bazel run` starts programs elsewhere."""
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."), path).resolve()


def command_of(benchmark, quick):
    command = [f"benchmarks/{benchmark.program}", "--json", *benchmark.arguments]
    return command + (["--rounds", "1" if quick else str(benchmark.rounds)] if benchmark.rounds else [])


def end_group(process):
    """Ends what `process` has started, too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def run_benchmark(command, timeout):
    """The measurements that it prints, in order: name, value, unit and, of a peer, peer_value."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{' '.join(command)}: not done after {timeout} s") from None
        finally:
            if process.poll() is None:
                end_group(process)
    if process.returncode != 0:
        last = "\n".join(errors.strip().splitlines()[-10:])
        raise BenchmarkError(f"{' '.join(command)}: exit status {process.returncode}\n{last}")
    try:
        measurements = [json.loads(line) for line in output.splitlines()]
        if not measurements:
            raise BenchmarkError(f"{' '.join(command)}: it printed no measurement")
        for measurement in measurements:
            measurement["name"], measurement["unit"], float(measurement["value"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{' '.join(command)}: its output is no measurements: {error!r}") from None
    return measurements


def add_measurements(lines, benchmark, measurements):
    """To `lines`, {(benchmark, name): line}."""
    for measurement in measurements:
        line = lines.setdefault(
            (benchmark.name, measurement["name"]),
            {
                "benchmark": benchmark.name,
                "name": measurement["name"],
                "unit": measurement["unit"],
                "values": [],
                "peer_values": [],
            },
        )
        line["values"].append(measurement["value"])
        if "peer_value" in measurement:
            line["peer_values"].append(measurement["peer_value"])


def own_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_suite(options, say, store):
    """Gives the results to `store` after each round, so that a run that is stopped keeps the rounds before."""
    lines, failures, others = {}, {}, []
    for turn in range(1, options.rounds + 1):
        start, busy, own = time.monotonic(), machine.busy_seconds(), own_seconds()
        for benchmark in BENCHMARKS:
            if benchmark.name not in options.only or benchmark.name in failures:
                continue
            began = time.monotonic()
            try:
                measurements = run_benchmark(command_of(benchmark, options.quick), options.timeout)
                add_measurements(lines, benchmark, measurements)
                outcome = f"{time.monotonic() - began:.0f} s"
            except (BenchmarkError, OSError) as error:
                failures[benchmark.name] = str(error)
                outcome = f"FAILED: {error}"
            say(f"round {turn}/{options.rounds}  {benchmark.name}: {outcome}")
        spent = (time.monotonic() - start) * len(os.sched_getaffinity(0))
        others.append(round(100 * max(0, machine.busy_seconds() - busy - own_seconds() + own) / spent, 1))
        say(f"round {turn}/{options.rounds}  other programs used {others[-1]} % of the CPU time")
        results = {
            "rounds": turn,
            "other_cpu_percent": others,
            "failures": [{"benchmark": name, "message": message} for name, message in failures.items()],
            "lines": list(lines.values()),
        }
        store(results)
    return results


def measure(options, out):
    peer = os.environ.get("PEER_PYTHON")
    try:
        pytorch = machine.pytorch_version(peer) if peer else None
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"PEER_PYTHON={peer} is no Python that has torch: {getattr(error, 'stderr', None) or error}")
    workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")
    described = {**machine.describe(f"benchmarks/{BENCHMARKS[0].program}", workspace), "pytorch": pytorch}

    def store(results):
        write_results({"machine": described, **results}, out)

    return {"machine": described, **run_suite(options, lambda text: print(text, flush=True), store)}


def to_json(results):
    """A measurement a line."""
    head = json.dumps({**results, "lines": []}, indent=1)
    lines = ",\n".join("  " + json.dumps(line) for line in results["lines"])
    return head.removesuffix("[]\n}") + f"[\n{lines}\n ]\n}}\n"


def write_results(results, folder):
    (folder / "performance.json").write_text(to_json(results), encoding="utf-8")
    (folder / "performance.svg").write_text(report.svg_chart(results), encoding="utf-8")


def main(arguments):
    options = parse_arguments(arguments)
    # What a benchmark has started ends with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = from_caller(options.out)
    if options.source:
        results = json.loads(from_caller(options.source).read_text(encoding="utf-8"))
    else:
        out.mkdir(parents=True, exist_ok=True)
        results = measure(options, out)
    print("\n" + report.text_table(results))
    if not options.source:
        print(f"\n{out}/performance.json, performance.svg")
    if options.write_docs:
        docs = Path(os.environ["BUILD_WORKSPACE_DIRECTORY"], "docs", "generated")
        write_results(results, docs)
        (docs / "performance.md").write_text(report.markdown(results), encoding="utf-8")
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
