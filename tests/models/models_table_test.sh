#!/usr/bin/env bash
# The table of models that are compared with transformers is the one that the tests' list would write now.
set -euo pipefail
PYTHONDONTWRITEBYTECODE=1 python3 tests/models/transformers_cases.py --check "$@"
