#!/usr/bin/env bash
# How the suite of benchmarks runs programs and shows their results; docs/generated/performance.md is what it would write now.
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=benchmarks
python3 tests/benchmarks/report_test.py
python3 benchmarks/report.py --check "$@"
