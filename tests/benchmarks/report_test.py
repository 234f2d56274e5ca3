"""Pure parts of the suite of benchmarks, and how it treats programs that fail."""

import contextlib
import io
import os
import subprocess
import sys
import time
import unittest
import unittest.mock
import xml.etree.ElementTree

import report
import run_all
from suite import BENCHMARKS, GOALS, Goal

POPEN = subprocess.Popen

MACHINE = {
    "cpu": "Abacus",
    "cores": 2,
    "memory_gib": 23.5,
    "kernel": "Linux 6.1",
    "compiler": "g++ 12",
    "libtorch": "2.15.0",
    "pytorch": "2.15.0",
    "commit": "abc",
    "date": "2026-01-02 03:04 UTC",
}


def line(benchmark, name, unit, values, peer_values=()):
    return {
        "benchmark": benchmark,
        "name": name,
        "unit": unit,
        "values": list(values),
        "peer_values": list(peer_values),
    }


def results(*lines, failures=()):
    return {
        "machine": MACHINE,
        "rounds": 3,
        "other_cpu_percent": [1.5, 0.2, 3.0],
        "failures": list(failures),
        "lines": list(lines),
    }


ADD = line("dtensor_dispatch", "add", "us", [1.25, 0.9, 0.95], [5, 4.5, 5])
MM = line("dtensor_dispatch", "mm", "us", [3, 2, 2.5], [5, 5, 5])
SAVE = line("checkpoint", "save", "GB/s", [2, 3, 4], [1, 1, 1])
SAVE_RATIO = line("checkpoint", "save_over_write", "x", [0.7, 0.8, 0.9])


class Summaries(unittest.TestCase):
    def test_median_and_spread(self):
        self.assertEqual(report.Spread.of([3, 1, 2]), report.Spread(2, 1, 3))
        self.assertEqual(report.Spread.of([4, 1, 2, 3]), report.Spread(2.5, 1, 4))
        self.assertIsNone(report.Spread.of([]))
        self.assertEqual(str(report.Spread.of([1, 2, 4])), "2.00 (1.00..4.00)")
        self.assertEqual(str(report.Spread.of([7])), "7.00")

    def test_numbers_have_three_digits_and_no_exponent(self):
        texts = [report.number(value) for value in (0, 0.00123, 0.5, 9.999, 12.34, 123.4, 123456)]
        self.assertEqual(texts, ["0", "0.00123", "0.500", "10.00", "12.3", "123", "123456"])

    def test_the_ratio_is_of_each_round(self):
        (add,) = report.summarize(results(ADD))
        self.assertEqual(add.ours, report.Spread(0.95, 0.9, 1.25))
        self.assertEqual(add.peer, report.Spread(5, 4.5, 5))
        self.assertEqual(add.ratio, report.Spread(0.2, 0.19, 0.25))
        self.assertEqual(add.gain, 5)

    def test_more_bytes_a_second_are_a_gain(self):
        (save,) = report.summarize(results(SAVE))
        self.assertEqual(save.gain, 3)


class Goals(unittest.TestCase):
    def states(self, *lines):
        found = report.outcomes(report.summarize(results(*lines)))
        return {(o.goal.benchmark, o.goal.line): o.state for o in found}

    def test_states(self):
        states = self.states(ADD, MM, SAVE_RATIO)
        self.assertEqual(states["dtensor_dispatch", "add"], "met")
        self.assertEqual(states["dtensor_dispatch", "mm"], "missed")
        self.assertEqual(states["checkpoint", "save_over_write"], "met")
        self.assertEqual(states["memory", "fully_shard/peak_mib"], "not measured")
        self.assertEqual(len(states), len(GOALS))

    def test_a_ratio_to_a_peer_that_did_not_run_is_not_measured(self):
        states = self.states(line("dtensor_dispatch", "mm", "us", [1]))
        self.assertEqual(states["dtensor_dispatch", "mm"], "not measured")

    def test_a_difference_that_is_not_above_zero_is_not_measured(self):
        states = self.states(line("fully_shard_step_tiny", "fully_shard/host_us_per_unit", "us", [-7, -2]))
        self.assertEqual(states["fully_shard_step_tiny", "fully_shard/host_us_per_unit"], "not measured")

    def test_at_least(self):
        states = self.states(line("checkpoint", "save_over_write", "x", [0.7, 0.79, 0.9]))
        self.assertEqual(states["checkpoint", "save_over_write"], "missed")

    def test_texts(self):
        def text(limit, **kind):
            return report.limit_text(Goal("", "", limit, "", **kind))

        self.assertEqual(text(1.25), "≤ 1.25")
        self.assertEqual(text(0.8, at_least=True), "≥ 0.8")
        self.assertEqual(text(1 / 15, of_peer=True), "≤ 1/15 of PyTorch")

    def test_they_name_benchmarks_of_the_suite(self):
        names = [benchmark.name for benchmark in BENCHMARKS]
        self.assertEqual(len(names), len(set(names)))
        self.assertLessEqual({goal.benchmark for goal in GOALS}, set(names))


class Pages(unittest.TestCase):
    def test_table(self):
        failure = {"benchmark": "memory", "message": "exit status 1\nout of memory"}
        table = report.text_table(results(MM, SAVE_RATIO, failures=[failure]))
        self.assertEqual(
            table.splitlines(),
            [
                "                   ours: median (min..max)      PyTorch  ratio  goal",
                "dtensor_dispatch",
                "  mm               2.50 (2.00..3.00)        us  5.00     0.500  ≤ 1/5 of PyTorch: missed",
                "checkpoint",
                "  save_over_write  0.800 (0.700..0.900)     x                   ≥ 0.8: met",
                "FAILED memory: exit status 1",
                "out of memory",
            ],
        )

    def test_page(self):
        failure = {"benchmark": "memory", "message": "exit status 1\nout of memory"}
        page = report.markdown(results(ADD, MM, failures=[failure]))
        for text in (
            "| CPU | Abacus, 2 cores |",
            "| other programs | used at most 3 % of the CPU time of a round |",
            "A rank has one thread.",
            f"1 of {len(GOALS)} goals are met, 1 missed, {len(GOALS) - 2} not measured.",
            "Missed:\n\n- `mm` of DTensors: 0.500 (0.400..0.600), goal ≤ 1/5 of PyTorch\n",
            "| `mm` of DTensors | ≤ 1/5 of PyTorch | 0.500 (0.400..0.600) |  | **missed** |",
            "| `add` of DTensors, us | ≤ 1 | 0.950 (0.900..1.25) |  | met |",
            "| add | 0.950 (0.900..1.25) | us | 5.00 (4.50..5.00) | 0.200 (0.190..0.250) |",
            "**It failed:**\n\n    exit status 1\n    out of memory\n",
        ):
            self.assertIn(text, page)
        self.assertNotIn("## checkpoint", page)
        self.assertNotIn("with plain copies for", page)
        self.assertNotIn("not quiet", page)
        busy = report.markdown({**results(ADD), "other_cpu_percent": [1, 60.2]})
        self.assertIn("**The machine was not quiet**: other programs used up to 60 % of its CPU time", busy)

    def test_a_floor_stands_beside_its_goal(self):
        step = line("fully_shard_step_768", "fully_shard/shm_over_ideal", "x", [1.5])
        floor = line("fully_shard_step_768", "floor/over_ideal", "x", [1.3])
        page = report.markdown(results(step, floor))
        self.assertIn("half its optimizer: 1.50, goal ≤ 1.15; 1.30 with plain copies for its collectives\n", page)
        self.assertIn("| ≤ 1.15 | 1.50 | 1.30 | **missed** |", page)

    def test_chart(self):
        slow = line("collectives", "all_gather/4KiB/shm_us", "us", [100], [10])
        plain = line("two_d_step", "plain/step_ms", "ms", [1], [1])
        noise = line("fully_shard_step_tiny", "fully_shard/host_us_per_unit", "us", [-3], [800])
        chart = report.svg_chart(results(ADD, slow, SAVE, SAVE_RATIO, plain, noise))
        root = xml.etree.ElementTree.fromstring(chart)
        bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
        spans = [(float(bar.get("x")), float(bar.get("x")) + float(bar.get("width"))) for bar in bars]
        # From 0.1 to 10, so that 1 is in the middle of the bars' 520.
        middle = report.LABEL_WIDTH + 260
        self.assertEqual([span[0] for span in spans], [middle, report.LABEL_WIDTH, middle])
        self.assertAlmostEqual(spans[0][1], middle + 260 * 0.69897, delta=0.2)
        self.assertEqual(spans[1][1], middle)
        texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        self.assertIn("dtensor_dispatch  add", texts)
        self.assertIn("0.100", texts)

    def test_stored_results_are_what_was_measured(self):
        stored = results(ADD, SAVE)
        self.assertEqual(run_all.json.loads(run_all.to_json(stored)), stored)


class Running(unittest.TestCase):
    def run_python(self, code, timeout=60):
        return run_all.run_benchmark([sys.executable, "-c", code], timeout)

    def test_measurements(self):
        code = """print('{"name": "a", "value": 1.5, "unit": "us"}')"""
        self.assertEqual(self.run_python(code), [{"name": "a", "value": 1.5, "unit": "us"}])

    def test_failures_say_what_the_program_said(self):
        for code, message in (
            ("import sys; sys.exit('no such thing')", "(?s)exit status 1.*no such thing"),
            ("import os; os.abort()", "exit status -6"),
            ("print('hello')", "its output is no measurements"),
            ("""print('{"name": "a"}')""", "its output is no measurements"),
            ("pass", "printed no measurement"),
        ):
            with self.subTest(code), self.assertRaisesRegex(run_all.BenchmarkError, message):
                self.run_python(code)

    def test_a_program_that_hangs_ends_with_what_it_started(self):
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        start = time.monotonic()
        command = ["bash", "-c", f"sleep 100 >&{writer} & sleep 100"]
        with unittest.mock.patch("subprocess.Popen", lambda *a, **k: POPEN(*a, **k, pass_fds=[writer])):
            with self.assertRaisesRegex(run_all.BenchmarkError, "not done after 1 s"):
                run_all.run_benchmark(command, timeout=1)
        os.close(writer)
        # The end of the pipe comes when nobody has it any more.
        self.assertEqual(os.read(reader, 1), b"")
        os.close(reader)
        self.assertLess(time.monotonic() - start, 30)

    def test_the_others_run_on(self):
        calls, stored = [], []

        def fake(command, timeout):
            calls.append(command[0])
            if command[0] == "benchmarks/memory":
                raise run_all.BenchmarkError("out of memory")
            return [{"name": "a", "value": len(calls), "unit": "us", "peer_value": 2}]

        options = run_all.parse_arguments(["--rounds", "2", "--only", "memory,two_d_step"])
        with unittest.mock.patch("run_all.run_benchmark", fake):
            found = run_all.run_suite(options, lambda text: None, lambda results: stored.append(results["rounds"]))
        self.assertEqual(calls, ["benchmarks/memory", "benchmarks/two_d_step", "benchmarks/two_d_step"])
        self.assertEqual(stored, [1, 2])
        self.assertEqual(found["failures"], [{"benchmark": "memory", "message": "out of memory"}])
        self.assertEqual(found["lines"], [line("two_d_step", "a", "us", [2, 3], [2, 2])])

    def test_arguments_that_are_refused(self):
        for arguments, message in (
            (["--only", "memory,nothing"], "no benchmark nothing; there are dtensor_dispatch"),
            (["--rounds", "0"], "must be at least 1"),
            (["--rounds", "many"], "must be at least 1"),
            (["--write-docs", "--quick"], "without --quick"),
        ):
            errors = io.StringIO()
            with self.subTest(arguments), contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
                run_all.parse_arguments(arguments)
            self.assertIn(message, errors.getvalue())

    def test_commands(self):
        by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
        self.assertEqual(
            run_all.command_of(by_name["fully_shard_step_768"], quick=True),
            ["benchmarks/fully_shard_step", "--json", "--size", "768", "--ranks", "2", "--rounds", "1"],
        )
        self.assertEqual(run_all.command_of(by_name["memory"], quick=False), ["benchmarks/memory", "--json"])


if __name__ == "__main__":
    unittest.main()
