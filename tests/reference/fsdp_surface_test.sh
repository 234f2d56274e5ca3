#!/usr/bin/env bash
# The table of the reference surface is the one that its script would write now.
set -euo pipefail
python3 "$1" --check "${@:2}"
