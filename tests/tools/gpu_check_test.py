"""What a report of tools/gpu_check says of programs that crash, hang or are not there: all the others' results."""

import contextlib
import io
import json
import os
import pathlib
import shutil
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
<testcase classname="a" name="first/part"><failure/></testcase>
<testcase classname="a" name="second"/>
</testsuite></testsuites>
XML
"""


class Running(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def program(self, name, text):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return [str(path)]

    def test_a_program_that_ends_has_run_all_tests(self):
        result = run.run_test(self.program("test", TEST_PROGRAM + "exit 1\n"), dict(os.environ), 60)
        self.assertEqual((result["exit_status"], result["failed"]), (1, ["first/part"]))
        self.assertEqual(result["passed"], ["second", "third"])

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

    def test_the_report_has_what_ran_whatever_happens_to_one(self):
        (self.folder / "commit").write_text("abc\n")
        (self.folder / "lib").mkdir()
        (self.folder / "lib" / "libtorch_cuda.so").touch()
        self.program("bin/good", TEST_PROGRAM.replace("<failure/>", ""))
        self.program("bin/measures", """#!/bin/sh\necho '{"value": 1}'\n""")
        out = self.folder / "report.json"
        arguments = ["run.py", "--libtorch", str(self.folder), "--out", str(out)]
        for replaced in (
            unittest.mock.patch("run.HERE", self.folder),
            unittest.mock.patch("run.TESTS", {"missing": ["missing"], "good": ["good"]}),
            unittest.mock.patch("run.BENCHMARKS", {"measures": ["measures"]}),
            unittest.mock.patch("run.prefer_library_path", shutil.copy),
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
        self.assertEqual(report["totals"], {"passed": 3, "failed": 0, "skipped": 0})

        with unittest.mock.patch("run.run_program", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
            run.main()
        self.assertEqual(json.loads(out.read_text())["complete"], False)


if __name__ == "__main__":
    unittest.main()
