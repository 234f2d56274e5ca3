"""What measurements look like: summaries, a table, a chart and docs/generated/performance.md.

  report.py RESULTS_JSON MD SVG           writes the page and its chart
  report.py --check RESULTS_JSON MD SVG   exits with 1 if they are not what would be written

Results are what run_all.py stores: "lines", each with the values of all rounds and PyTorch's in "peer_values" (empty
where it has none); "failures", "machine", and how it was run.
"""

import html
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from suite import BENCHMARKS, GOALS

HIGHER_IS_BETTER = "GB/s"  # the unit
QUIET_PERCENT = 10  # of the CPU time, for other programs


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @staticmethod
    def of(values):
        return Spread(statistics.median(values), min(values), max(values)) if values else None

    def __str__(self):
        text = number(self.median)
        return text if self.low == self.high else f"{text} ({number(self.low)}..{number(self.high)})"


@dataclass(frozen=True)
class Line:
    benchmark: str
    name: str
    unit: str
    ours: Spread
    # None: there is no peer.
    peer: Spread
    # Ours / PyTorch, round by round.
    ratio: Spread

    @property
    def gain(self):
        """How many times better than PyTorch."""
        return self.ratio.median if self.unit == HIGHER_IS_BETTER else 1 / self.ratio.median


@dataclass(frozen=True)
class Outcome:
    goal: object
    # None: not measured.
    reached: Spread
    # None: the goal names none, or it was not measured.
    floor: Spread = None

    @property
    def state(self):
        # A difference of two times that is not above zero in some round is noise.
        if self.reached is None or self.reached.low <= 0:
            return "not measured"
        median, limit = self.reached.median, self.goal.limit
        return "met" if (median >= limit if self.goal.at_least else median <= limit) else "missed"


def number(value):
    """Three digits, no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def limit_text(goal):
    sign = "≥" if goal.at_least else "≤"
    if not goal.of_peer:
        return f"{sign} {goal.limit:g}"
    return f"{sign} 1/{1 / goal.limit:g} of PyTorch" if goal.limit < 1 else f"{sign} {goal.limit:g} x PyTorch"


def summarize(results):
    lines = []
    for line in results["lines"]:
        peer = line["peer_values"]
        ratios = [a / b for a, b in zip(line["values"], peer)]
        ours = Spread.of(line["values"])
        lines.append(Line(line["benchmark"], line["name"], line["unit"], ours, Spread.of(peer), Spread.of(ratios)))
    return lines


def outcomes(lines):
    """Of all goals, in the order of the suite."""
    found = {(line.benchmark, line.name): line for line in lines}
    result = []
    for goal in GOALS:
        line, floor = found.get((goal.benchmark, goal.line)), found.get((goal.benchmark, goal.floor))
        result.append(Outcome(goal, line and (line.ratio if goal.of_peer else line.ours), floor and floor.ours))
    return result


def text_table(results):
    """What the suite prints: one line a measurement."""
    lines = summarize(results)
    by_line = {}
    for outcome in outcomes(lines):
        if outcome.reached is not None:
            text = f"{limit_text(outcome.goal)}: {outcome.state}"
            by_line[outcome.goal.benchmark, outcome.goal.line] = text
    rows = [("", "ours: median (min..max)", "", "PyTorch", "ratio", "goal")]
    for benchmark in BENCHMARKS:
        of_benchmark = [line for line in lines if line.benchmark == benchmark.name]
        if of_benchmark:
            rows.append((benchmark.name, "", "", "", "", ""))
        for line in of_benchmark:
            peer, ratio = (str(line.peer), number(line.ratio.median)) if line.peer else ("", "")
            goal = by_line.get((line.benchmark, line.name), "")
            rows.append(("  " + line.name, str(line.ours), line.unit, peer, ratio, goal))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
    return text + "".join(f"\nFAILED {failure['benchmark']}: {failure['message']}" for failure in results["failures"])


# The chart.

LABEL_WIDTH, BAR_WIDTH, ROW_HEIGHT, TOP, MARGIN = 330, 520, 18, 46, 70


def charted(lines):
    """The lines of the chart: what libtorch computes by itself, and gloo beside gloo, say nothing there. A difference of
    two times may be lost in noise, and is not above zero then."""
    return [
        line
        for line in lines
        if line.ratio
        and line.ratio.median > 0
        and not line.name.startswith("plain/")
        and "/gloo_us" not in line.name
    ]


def svg_chart(results):
    """Bars on a logarithmic scale: how many times better than PyTorch."""
    lines = charted(summarize(results))
    gains = [line.gain for line in lines] or [1]
    low = min(0, math.floor(math.log10(min(gains))))
    high = max(1, math.ceil(math.log10(max(gains))))
    width, height = LABEL_WIDTH + BAR_WIDTH + MARGIN, TOP + ROW_HEIGHT * len(lines) + 10

    def x(gain):
        return LABEL_WIDTH + BAR_WIDTH * (math.log10(gain) - low) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LABEL_WIDTH}" y="16" font-size="14" fill="#222222">Times as fast as PyTorch (memory: times less), '
        "logarithmic</text>",
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        color = "#555555" if power == 0 else "#dddddd"
        out.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{height - 8}" stroke="{color}"/>')
        out.append(f'<text x="{at:.1f}" y="{TOP - 12}" text-anchor="middle" fill="#555555">{10.0**power:g} x</text>')
    for i, line in enumerate(lines):
        y = TOP + ROW_HEIGHT * i
        left, right = sorted((x(1), x(line.gain)))
        color = "#2f7d4f" if line.gain >= 1 else "#b5482f"
        label = html.escape(f"{line.benchmark}  {line.name}")
        out.append(f'<text x="{LABEL_WIDTH - 8}" y="{y + 12}" text-anchor="end" fill="#222222">{label}</text>')
        out.append(
            f'<rect x="{left:.1f}" y="{y + 2}" width="{right - left:.1f}" height="{ROW_HEIGHT - 5}" fill="{color}"/>'
        )
        out.append(f'<text x="{right + 5:.1f}" y="{y + 12}" fill="#222222">{number(line.gain)}</text>')
    return "\n".join(out) + "\n</svg>\n"


# The page.


def machine_section(results):
    machine, peer = results["machine"], results["machine"].get("pytorch")
    rows = [
        ("CPU", f"{machine['cpu']}, {machine['cores']} cores"),
        ("memory", f"{machine['memory_gib']:g} GiB"),
        ("kernel", machine["kernel"]),
        ("compiler", machine["compiler"]),
        ("libtorch", machine["libtorch"]),
        ("PyTorch", f"{peer}, in Python" if peer else "not measured"),
        ("sources", f"{machine['commit'] or 'unknown'}, {machine['date']}"),
        ("other programs", f"used at most {max(results['other_cpu_percent']):.0f} % of the CPU time of a round"),
    ]
    return "\n".join(["| | |", "|---|---|"] + [f"| {name} | {value} |" for name, value in rows])


def floor_text(outcome):
    return f"; {outcome.floor} with plain copies for its collectives" if outcome.floor else ""


def goals_section(lines):
    all_outcomes = outcomes(lines)
    count = {state: sum(o.state == state for o in all_outcomes) for state in ("met", "missed", "not measured")}
    text = f"{count['met']} of {len(all_outcomes)} goals are met, {count['missed']} missed"
    text += f", {count['not measured']} not measured.\n\n" if count["not measured"] else ".\n\n"
    missed = [o for o in all_outcomes if o.state == "missed"]
    if missed:
        text += "Missed:\n\n"
        text += "".join(f"- {o.goal.what}: {o.reached}, goal {limit_text(o.goal)}{floor_text(o)}\n" for o in missed)
        text += "\n"
    rows = ["| what | goal | reached: median (min..max) | with plain copies | |", "|---|---|---|---|---|"]
    for o in all_outcomes:
        state = f"**{o.state}**" if o.state != "met" else o.state
        rows.append(f"| {o.goal.what} | {limit_text(o.goal)} | {o.reached or ''} | {o.floor or ''} | {state} |")
    return text + "\n".join(rows)


def benchmark_section(benchmark, lines, failures):
    of_benchmark = [line for line in lines if line.benchmark == benchmark.name]
    failed = [failure["message"] for failure in failures if failure["benchmark"] == benchmark.name]
    if not of_benchmark and not failed:
        return ""
    command = " ".join(["./bazelw run", f"//benchmarks:{benchmark.program}"])
    if benchmark.arguments:
        command += " -- " + " ".join(benchmark.arguments)
    text = f"\n## {benchmark.name}\n\n{benchmark.what}\n\n    {command}\n"
    for message in failed:
        text += "\n**It failed:**\n\n" + "".join(f"    {line}\n" for line in message.splitlines())
    if of_benchmark:
        text += "\n| | ours: median (min..max) | unit | PyTorch | ours / PyTorch |\n|---|---|---|---|---|\n"
    for line in of_benchmark:
        peer, ratio = (line.peer, line.ratio) if line.peer else ("", "")
        text += f"| {line.name} | {line.ours} | {line.unit} | {peer} | {ratio} |\n"
    return text


def noise_warning(results):
    others = max(results["other_cpu_percent"])
    if others <= QUIET_PERCENT:
        return ""
    return (
        f"**The machine was not quiet**: other programs used up to {others:.0f} % of its CPU time, so times are too long\n"
        "and ratios rough.\n\n"
    )


def markdown(results, chart="performance.svg"):
    lines = summarize(results)
    rounds = results["rounds"]
    head = f"""# Performance

Generated by `./bazelw run //benchmarks:all -- --write-docs` from `performance.json` beside it; a test checks that it is
up to date.

{machine_section(results)}

{noise_warning(results)}A rank has one thread. The benchmarks ran in {rounds} round{'' if rounds == 1 else 's'}, in which they took turns; in a round
each line is the fastest of the benchmark's own rounds, and here stand the median, the least and the most of the
suite's rounds. PyTorch did the same work in the same rounds, on the same machine. Times on another machine differ;
ratios less.

    PEER_PYTHON=$(./bazelw info output_base)/external/peer_python/python ./bazelw run //benchmarks:all -- --rounds {rounds}

![How many times as fast as PyTorch]({chart})

## Goals

{goals_section(lines)}
"""
    return head + "".join(benchmark_section(b, lines, results["failures"]) for b in BENCHMARKS)


def main(arguments):
    check = arguments[:1] == ["--check"]
    source, page, chart = map(Path, arguments[check:])
    results = json.loads(source.read_text(encoding="utf-8"))
    for path, text in ((page, markdown(results)), (chart, svg_chart(results))):
        if not check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not up to date: run python3 benchmarks/report.py {source} {page} {chart}")


if __name__ == "__main__":
    main(sys.argv[1:])
