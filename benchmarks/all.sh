#!/usr/bin/env bash
# `./bazelw run //benchmarks:all -- --help`: all benchmarks, in turns.
set -euo pipefail
# Programs and scripts lie in the runfiles, where `bazel run` starts this, too.
[[ ! -d $0.runfiles/tessera ]] || cd "$0.runfiles/tessera"
PYTHONDONTWRITEBYTECODE=1 exec python3 benchmarks/run_all.py "$@"
