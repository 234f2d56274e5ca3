#!/usr/bin/env bash
# What tools/gpu_check/run.py reports of programs that fail.
set -euo pipefail
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=tools/gpu_check
python3 tests/tools/gpu_check_test.py
