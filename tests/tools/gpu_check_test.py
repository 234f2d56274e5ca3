"""What a report of tools/gpu_check says of programs that crash, hang or are not there: all the others' results."""

import contextlib
import gzip
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import run

# Knows three test cases, and reports the first, which failed in a section, and the second.
TEST_PROGRAM = """#!/bin/bash
if [[ $1 == --list-test-names-only ]]; then
  printf 'first\\nsecond\\nthird\\n'
  exit 3
fi
cat >"${@: -1}" <<XML
<testsuites><testsuite>
<testcase classname="a" name="first/part"><failure message="a == b">1 == 2
Exception raised from here
frame #0: far away</failure></testcase>
<testcase classname="a" name="second"/>
</testsuite></testsuites>
XML
"""


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.01)


def state_of(pid):
    """Of a process, as "S"; None where there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return None


class Running(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def program(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return [str(path)]

    def packed(self, name, text):
        (self.folder / "bin").mkdir(exist_ok=True)
        (self.folder / "bin" / f"{name}.gz").write_bytes(gzip.compress(text.encode()))

    def test_a_program_that_ends_has_run_all_tests(self):
        result = run.run_test(self.program("test", TEST_PROGRAM + "exit 1\n"), dict(os.environ), 60)
        self.assertEqual((result["exit_status"], result["failed"]), (1, ["first/part"]))
        self.assertEqual(result["passed"], ["second", "third"])
        self.assertEqual(result["reasons"], {"first/part": "a == b 1 == 2"})

    def test_a_program_that_crashes_has_run_what_it_reports(self):
        result = run.run_test(self.program("test", TEST_PROGRAM + "kill -SEGV $$\n"), dict(os.environ), 60)
        self.assertEqual((result["exit_status"], result["failed"]), (-11, ["first/part"]))
        self.assertEqual(result["passed"], ["second"])

    def test_what_a_benchmark_measured_before_it_was_stopped(self):
        text = """#!/bin/sh\necho '{"value": 1}'; echo '{"value": inf}'; echo '{"val'; kill -KILL $$\n"""
        result = run.run_benchmark(self.program("benchmark", text), dict(os.environ), 60)
        self.assertEqual((result["exit_status"], result["measurements"]), (-9, [{"value": 1}]))
        self.assertEqual(result["unreadable"], ['{"value": inf}', '{"val'])

    def test_a_program_that_hangs_ends_with_what_it_started(self):
        start = time.monotonic()
        status, text = run.run(["bash", "-c", "echo here; sleep 100 & sleep 100"], dict(os.environ), timeout=1)
        self.assertEqual((status, text), (None, "here\n"))
        self.assertLess(time.monotonic() - start, 30)

    def test_a_program_that_hangs_may_write_its_report(self):
        text = TEST_PROGRAM.replace("cat >", "trap 'report \"$@\"; exit 1' TERM\nreport() { cat >")
        text = text.replace("</testsuites>\nXML\n", "</testsuites>\nXML\n}\nsleep 100 & wait\n")
        result = run.run_test(self.program("test", text), dict(os.environ), 1)
        self.assertEqual((result["exit_status"], result["failed"]), (None, ["first/part"]))
        self.assertEqual(result["passed"], ["second"])

    def test_a_program_ends_with_this_process_however_it_ends(self):
        pid_file = self.folder / "pid"
        script = f"echo $$ >{pid_file}.new; mv {pid_file}.new {pid_file}; sleep 100"
        parent = "import os, run, sys; run.run(['bash', '-c', sys.argv[1]], dict(os.environ), 60)"
        with subprocess.Popen([sys.executable, "-c", parent, script], stderr=subprocess.DEVNULL) as process:
            wait_until(pid_file.exists)
            process.kill()
        wait_until(lambda: state_of(int(pid_file.read_text())) in ("Z", None))

    def test_what_a_budget_leaves_is_not_run(self):
        self.assertGreater(run.Limits(60, 5).of_next(), 0)
        self.assertLessEqual(run.Limits(60, 5).of_next(), 5)
        self.assertEqual(run.Limits(60, None).of_next(), 60)
        result = run.run_program(run.run_command, "no such program", [], {}, run.Limits(60, 0))
        self.assertIsNone(result["exit_status"])
        self.assertRegex(result["output"], "not run: the budget of 0 s")

    def test_the_report_has_what_ran_whatever_happens_to_one(self):
        (self.folder / "commit").write_text("abc\n")
        (self.folder / "lib").mkdir()
        (self.folder / "lib" / "libtorch_cuda.so").touch()
        self.packed("good", re.sub("<failure.*</failure>", "", TEST_PROGRAM, flags=re.S))
        self.packed("measures", """#!/bin/sh\necho '{"value": 1}'\n""")
        (self.folder / "peer").mkdir()
        (self.folder / "peer" / "peer.py").write_text("import sys; print('step/ms', sys.argv[1]); print('other text')")
        self.packed("ends", "#!/bin/sh\necho as told; exit $1\n")
        version = self.folder / "include/torch/headeronly/version.h"
        version.parent.mkdir(parents=True)
        version.write_text('#define TORCH_VERSION \\\n  "2.11.0"\n')
        (self.folder / "libtorch_version.h").write_text('#define TORCH_VERSION \\\n  "2.15.0"\n')
        out = self.folder / "report.json"
        arguments = ["run.py", "--libtorch", str(self.folder), "--out", str(out)]
        for replaced in (
            unittest.mock.patch("run.HERE", self.folder),
            unittest.mock.patch("run.TESTS", {"missing": ["missing"], "good": ["good"]}),
            unittest.mock.patch(
                "run.BENCHMARKS", {"measures": ["measures"], "peer_step": ["peer.py", "2.5"], "peer_other": ["peer.py"]}
            ),
            unittest.mock.patch("run.default_libtorch", lambda: self.folder),
            unittest.mock.patch("run.COMMANDS", {"ends": ["ends", "3"], "memcheck": ["good"], "opdb_replay": ["good"]}),
            unittest.mock.patch("run.devices", lambda: [{"name": "a GPU"}]),
            unittest.mock.patch("run.prefer_library_path"),
            unittest.mock.patch("run.PREFIXES", {"memcheck": ["no-such-sanitizer"]}),
            unittest.mock.patch("sys.argv", arguments),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            self.enterContext(replaced)
        self.assertEqual(run.main(), 1)
        report = json.loads(out.read_text())
        self.assertEqual((report["complete"], report["ok"]), (True, False))
        self.assertRegex(report["tests"]["missing"]["output"], "FileNotFoundError")
        self.assertEqual(report["tests"]["good"]["passed"], ["first", "second", "third"])
        self.assertEqual(report["benchmarks"]["measures"]["measurements"], [{"value": 1}])
        self.assertEqual(report["benchmarks"]["peer_step"]["measurements"], [{"name": "step/ms", "value": 2.5}])
        self.assertRegex(report["benchmarks"]["peer_other"]["output"], "IndexError")
        self.assertEqual(report["totals"], {"passed": 3, "failed": 0, "skipped": 0})
        self.assertEqual((report["built_with_libtorch"], report["libtorch"]), ("2.15.0", "2.11.0"))
        self.assertEqual(report["commands"]["ends"], {"exit_status": 3, "output": "as told\n"})
        self.assertEqual((self.folder / "report.ends.txt").read_text(), "as told\n")
        self.assertRegex(report["commands"]["memcheck"]["skipped"], "no no-such-sanitizer on PATH")
        self.assertRegex(report["commands"]["opdb_replay"]["skipped"], "without a corpus")

        with unittest.mock.patch("run.default_libtorch", lambda: None):
            self.assertEqual(run.main(), 1)
        report = json.loads(out.read_text())
        self.assertEqual(report["benchmarks"]["peer_step"]["skipped"], "this Python has no torch for CUDA")

        self.assertRegex(run.why_not("train_large", [{"memory.total": "24564 MiB"}]), "36000 MiB")
        self.assertEqual(run.why_not("train_large", [{"memory.total": "81559 MiB"}]), "")
        with unittest.mock.patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": "1"}):
            self.assertEqual(run.visible([{}, {}]), 1)

        with unittest.mock.patch("run.run_program", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            run.main()
        self.assertEqual(json.loads(out.read_text())["complete"], False)


if __name__ == "__main__":
    unittest.main()
