#!/usr/bin/env bash
# ./bazelw run //tools:format              formats all C++ sources of the checkout
# ./bazelw run //tools:format -- --check   names those that are formatted otherwise, and fails if there are any
set -euo pipefail
clang_format=$PWD/$1
shift
cd -- "$BUILD_WORKSPACE_DIRECTORY"

case ${1-} in
  '') options=(-i) ;;
  --check) options=(--dry-run -Werror) ;;
  *) echo "usage: ./bazelw run //tools:format [-- --check]" >&2; exit 2 ;;
esac
git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 "$clang_format" "${options[@]}"
