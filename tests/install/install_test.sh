#!/usr/bin/env bash
# A program that CMake builds over an installed Tessera trains; and what its user gets wrong is named.
#   install_test.sh INSTALL cpu|cuda      what Tessera was built for
set -euo pipefail
install=$PWD/$1
built_for=$2
prefix=$TEST_TMPDIR/prefix
build=$TEST_TMPDIR/build

fail() { echo "FAILED: $*" >&2; exit 1; }
# expect_error <words> <command>...: it fails, and says them.
expect_error() {
  local words=$1 output
  shift
  ! output=$("$@" 2>&1) || fail "no error: $*"
  output=$(tr -s ' \n' ' ' <<<"$output")  # cmake wraps lines
  [[ $output == *"$words"* ]] || fail "$* says \"$output\", not \"$words\""
}

expect_error "usage:" "$install"
"$install" "$prefix"

# Where it is installed there may be no folders of the build, and nothing of CUDA unless it was built for that.
dynamic=$(LC_ALL=C readelf -d "$prefix/lib/libtessera.so")
needed=(libtorch_cpu.so libc10.so libcrypto.so libpcre2-8.so libutf8proc.so)
unwanted=(libcupti _solib RPATH RUNPATH)
if [[ $built_for == cuda ]]; then
  needed+=(libtorch_cuda.so libc10_cuda.so libcudart.so)
else
  unwanted+=(libcud)
fi
for name in "${needed[@]}"; do
  [[ $dynamic == *"(NEEDED)"*"[$name"* ]] || fail "libtessera.so does not need $name: $dynamic"
done
for name in "${unwanted[@]}"; do
  [[ $dynamic != *"$name"* ]] || fail "libtessera.so names $name: $dynamic"
done

! nm -DC --defined-only "$prefix/lib/libtessera.so" | grep -q ' T fmt::' || fail "libtessera.so exports functions of fmt"

configure=(cmake -S examples/cmake -B "$build" -DCMAKE_PREFIX_PATH="$prefix")
expect_error "nowhere/include/torch/headeronly/version.h is not there; set Tessera_LIBTORCH" \
  "${configure[@]}" -DTessera_LIBTORCH=/nowhere
mkdir -p "$TEST_TMPDIR/old/include/torch/headeronly"
printf '#define TORCH_VERSION_MAJOR 1\n#define TORCH_VERSION_MINOR 9\n' >"$TEST_TMPDIR/old/include/torch/headeronly/version.h"
expect_error "old is 1.9; set Tessera_LIBTORCH" "${configure[@]}" -DTessera_LIBTORCH="$TEST_TMPDIR/old"

# Versions that this one does not serve.
for version in 0.2 1 0.0; do
  mkdir -p "$TEST_TMPDIR/version"
  printf 'cmake_minimum_required(VERSION 3.18)\nproject(v LANGUAGES NONE)\nfind_package(Tessera %s REQUIRED)\n' $version \
    >"$TEST_TMPDIR/version/CMakeLists.txt"
  expect_error "compatible with requested version \"$version\"" \
    cmake -S "$TEST_TMPDIR/version" -B "$TEST_TMPDIR/version/build" -DCMAKE_PREFIX_PATH="$prefix"
done

rm -rf "$build"
"${configure[@]}"
cmake --build "$build"
output=$("$build/fully_shard")
echo "$output"
[[ $output == *"the sharded model equals the one that was trained in one process"* ]] || fail "it does not train"

# A program that has folders and headers of the same names, and includes headers that no other header includes.
program=$TEST_TMPDIR/program
mkdir -p "$program/"{base,comm,nn}
echo '#define OWN_ERROR 40' >"$program/base/error.h"
echo '#define OWN_GROUP 2' >"$program/comm/process_group.h"
echo '#error "who includes this?"' >"$program/nn/hooked.h"
cat >"$program/program.cpp" <<'END'
#include <tessera/comm/process_group.h>
#include <tessera/device_mesh/device_mesh.h>
#include <tessera/fully_shard/fully_shard.h>
#include <tessera/nn/linear.h>
#include <torch/nn/modules/linear.h>

#include "base/error.h"
#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/forward_method.h"
#include "nn/reset_parameters.h"

int main() {
  torch::nn::Linear stock(2, 3);
  tessera::reset_parameters(*stock);
  const auto twice = [&](at::Tensor x) { return stock(x) * 2; };
  const bool calls = tessera::forward_method(*stock, twice, stock->weight).numel() == 9;
  tessera::nn::Linear linear(2, 3);
  tessera::fully_shard(linear, {.mesh = tessera::init_device_mesh(at::kCPU, {1})});
  return calls && OWN_ERROR + OWN_GROUP == 42 && tessera::get_rank() == 0 ? 0 : 1;
}
END
cat >"$program/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.18)
project(program LANGUAGES CXX)
find_package(Tessera 0.1 REQUIRED)
add_executable(program program.cpp)
target_include_directories(program PRIVATE .)
target_link_libraries(program PRIVATE Tessera::tessera)
END
cmake -S "$program" -B "$program/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release
cmake --build "$program/build"
"$program/build/program" || fail "the program: exit code $?"

# Before C++23 a comma in brackets would mean the last name alone.
sed -i 's/tessera::get_rank() == 0/tessera::init_device_mesh(at::kCPU, {1}, {"dp"})["dp", "dp"].ndim() == 1/' "$program/program.cpp"
expect_error "comma-subscript" cmake --build "$program/build"

# The component for GPUs, and no other.
component=$TEST_TMPDIR/component
mkdir -p "$component"
cat >"$component/program.cpp" <<'END'
#include <cstdio>
#include <exception>
#include <tessera/comm/process_group.h>

int main() {
  try {
    tessera::init_process_group({.backend = "nccl"});
    std::puts("a group over NCCL");
    tessera::destroy_process_group();
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
END
configure_component() {
  cat >"$component/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.18)
project(component LANGUAGES CXX)
find_package(Tessera 0.1 REQUIRED COMPONENTS $1)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE Tessera::tessera)
END
  cmake -S "$component" -B "$component/build" -DCMAKE_PREFIX_PATH="$prefix"
}
expect_error "it has no component rocm" configure_component rocm
if [[ $built_for == cpu ]]; then
  expect_error "it has no component cuda; there is one after ./bazelw run --config=cuda //install" configure_component cuda
else
  configure_component cuda
  cmake --build "$component/build"
  output=$("$component/build/program")
  [[ $output == "a group over NCCL" || $output == *"no CUDA device is visible"* ]] || fail "over NCCL: $output"
fi
