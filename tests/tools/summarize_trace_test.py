"""What tools/summarize_trace says of traces whose times are known."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest


def event(category, name, begin, duration, thread=1):
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "pid": 0, "tid": thread}


class Summarizing(unittest.TestCase):
    def run_on(self, events, *options):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "rank-0.json").write_text(json.dumps({"traceEvents": events}))
        command = [sys.executable, "tools/summarize_trace", str(folder / "rank-0.json"), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def rows(self, events, *options):
        """Milliseconds and percent by kind."""
        result = self.run_on(events, *options)
        self.assertEqual(result.returncode, 0, result.stderr)
        table = result.stdout.split("\n\n")[0].splitlines()[1:]
        return {row[:18].strip(): (float(row[18:].split()[0]), float(row.split()[-2])) for row in table}

    def test_an_op_does_not_count_what_it_calls(self):
        events = [
            event("range", "forward model", 0, 10000),
            event("op", "aten::linear", 0, 5000),
            event("op", "aten::addmm", 1000, 3000),
            event("op", "aten::gelu", 6000, 2000),
            event("op", "aten::mm", 0, 1000, thread=2),
            event("comm", "wait all_gather", 8000, 2000),
        ]
        expected = {"matrix products": (6, 60), "activations": (2, 20), "collectives": (2, 20)}
        self.assertEqual(self.rows(events), expected)

    def test_times_are_divided_by_the_steps(self):
        self.assertEqual(self.rows([event("op", "aten::mm", 0, 4000)], "--steps", "2"), {"matrix products": (2, 100)})

    def test_on_a_gpu_kernels_count_and_what_is_left_is_idle(self):
        events = [
            event("op", "aten::mm", 0, 9000),
            event("gpu", "sm90_xmma_gemm_bf16bf16", 1000, 4000),
            event("gpu", "flash_fwd_kernel", 4000, 2000, thread=2),  # beside the product for 1 ms
            event("gpu", "tessera::copy_tiles", 8000, 2000),
        ]
        expected = {"matrix products": (4, 40), "attention": (2, 20), "copies and casts": (2, 20), "idle": (3, 30)}
        self.assertEqual(self.rows(events), expected)

    def test_what_has_no_times_of_ops_is_refused(self):
        for events in [[], [event("comm", "wait all_gather", 0, 1)]]:
            result = self.run_on(events)
            self.assertEqual(result.returncode, 1)
            self.assertIn("has neither kernels of a GPU nor ops", result.stderr)
        self.assertIn("--steps 0: must be 1 or more", self.run_on([], "--steps", "0").stderr)


if __name__ == "__main__":
    unittest.main()
