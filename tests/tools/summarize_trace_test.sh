#!/usr/bin/env bash
# What tools/summarize_trace says of traces whose times are known.
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=1
python3 tests/tools/summarize_trace_test.py
