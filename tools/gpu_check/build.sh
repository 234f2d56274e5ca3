#!/usr/bin/env bash
# tools/gpu_check/build.sh <folder>: builds the tests of CUDA, those that also run on a GPU (testing/test_devices.h), the
# benchmarks of GPUs and train_gpt, and gathers them with run.py in a new folder of less than 60 MiB, for a machine that
# has a GPU, the same libtorch and OpenSSL's libcrypto, but neither Bazel nor a network:
#
#   LIBTORCH=/path/to/torch tools/gpu_check/build.sh /tmp/gpu_check      (without LIBTORCH: the pinned one)
#   python3 /tmp/gpu_check/run.py --libtorch /path/to/torch --out report.json
#
# CORPUS=FILE adds calls of ops with their results, for opdb_replay (tests/dtensor/opdb/record_opdb.py).
set -euo pipefail
(($# == 1)) || { echo "usage: tools/gpu_check/build.sh <new folder>" >&2; exit 2; }
[[ $1 == /* ]] && out=$1 || out=$PWD/$1
[[ ! -e $out ]] || { echo "$out exists already; name a new folder" >&2; exit 2; }
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

programs=(
  tests/cuda/cuda_test tests/comm/{gloo_backend_test,comm_device_test}
  tests/dtensor/{dtensor_test,ops_test,opdb_replay} tests/fully_shard/fully_shard_device_test
  tests/checkpoint/checkpoint_device_test tests/parallel/{parallel_device,parallel}_test
  tests/reference/fsdp_offload_test tests/captured_step/captured_step_test
  benchmarks/{gpu_kernels,gpu_step} examples/train_gpt
)
labels=("${programs[@]/#/\/\/}")
labels=("${labels[@]%/*}")
for i in "${!programs[@]}"; do labels[i]+=:${programs[i]##*/}; done
${BAZEL:-./bazelw} build --config=cuda "${labels[@]}"
bazel_bin=$(${BAZEL:-./bazelw} info --config=cuda bazel-bin)
stand_ins=$(${BAZEL:-./bazelw} info output_base)/external/cuda/stand_ins

mkdir -p "$out/bin"
for program in "${programs[@]}"; do
  strip --strip-unneeded -o "$out/bin/${program##*/}" "$bazel_bin/$program"
  gzip -n "$out/bin/${program##*/}"
done
if [[ -d $stand_ins ]]; then
  mkdir "$out/stand_ins"
  cp "$stand_ins"/lib*.so.*[0-9] "$out/stand_ins/"
fi
cp tools/gpu_check/run.py tools/summarize_trace "$out/"
mkdir "$out/peer"
cp benchmarks/peers/{gpu_step_peer,train_large_peer,fully_shard_step_peer,peer_measure}.py "$out/peer/"
cat README.md docs/*.md {dtensor,fully_shard}/{,*/}*.h >"$out/text.txt"  # for train_gpt
cp "$(${BAZEL:-./bazelw} info --config=cuda output_base)/external/libtorch/site/torch/include/torch/headeronly/version.h" \
  "$out/libtorch_version.h"
if [[ -n ${CORPUS-} ]]; then
  cp -- "$CORPUS" "$out/corpus.pt"
fi
git rev-parse HEAD >"$out/commit" 2>/dev/null || echo unknown >"$out/commit"

mib=$(($(du -sk "$out" | cut -f1) / 1024 + 1))
((mib < 60)) || { echo "$out has $mib MiB; 60 are allowed" >&2; exit 1; }
echo "$out: $mib MiB"
