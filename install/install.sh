#!/usr/bin/env bash
# `./bazelw run //install -- <prefix>`: Tessera as a shared library, its headers, and what CMake's find_package(Tessera)
# reads, for programs that another build system builds (examples/cmake). With --config=cuda it has kernels and NCCL.
#
#   <prefix>/include/tessera/fully_shard/fully_shard.h ...   as <tessera/fully_shard/fully_shard.h>, or without tessera/
#   <prefix>/lib/libtessera.so
#   <prefix>/lib/cmake/Tessera/TesseraConfig.cmake, TesseraConfigVersion.cmake
set -euo pipefail
umask 022  # a prefix is for all who use the machine
(($# == 1)) || { echo "usage: ./bazelw run //install -- <prefix>" >&2; exit 2; }
# `bazel run` starts this in the runfiles, and says where it was called.
[[ $1 == /* ]] && prefix=$1 || prefix=${BUILD_WORKING_DIRECTORY:-$PWD}/$1
[[ ! -d $0.runfiles/tessera ]] || cd "$0.runfiles/tessera"

# A header finds its neighbours by names with tessera/ before them, whatever base/ or comm/ the program has of its own.
folders=$(cut -d / -f 1 install/headers.txt | sort -u | paste -s -d '|')
while read -r header; do
  install -D -m 644 /dev/null "$prefix/include/tessera/$header"
  sed -E "s,^(#include )\"(($folders)/),\1\"tessera/\2," "$header" >"$prefix/include/tessera/$header"
done <install/headers.txt
install -D -m 644 install/libtessera.so "$prefix/lib/libtessera.so"

version=$(realpath ../libtorch/site/torch/include/torch/headeronly/version.h)
torch_number() { awk -v name="TORCH_VERSION_$1" '$2 == name { print $3 }' "$version"; }
own_number() { awk -v name="TESSERA_VERSION_$1" '$2 == name { print $3 }' base/version.h; }
cuda_folders=  # of libtorch's CUDA libraries; none: built for the CPU
if [[ -e ../cuda/folders.txt ]]; then
  while read -r folder; do
    if [[ $folder == */external/cuda/stand_ins ]]; then  # in Bazel's output, which may be removed
      install -D -m 644 -t "$prefix/lib/stand_ins" "$folder"/lib*.so.*
      folder=\${_tessera_prefix}/lib/stand_ins
    fi
    cuda_folders+=${cuda_folders:+;}$folder
  done <../cuda/folders.txt
fi
mkdir -p "$prefix/lib/cmake/Tessera"
sed -e "s|@VERSION@|$(own_number MAJOR).$(own_number MINOR).$(own_number PATCH)|" \
  -e "s|@MAJOR@|$(own_number MAJOR)|" -e "s|@MINOR@|$(own_number MINOR)|" \
  install/TesseraConfigVersion.cmake.in >"$prefix/lib/cmake/Tessera/TesseraConfigVersion.cmake"
sed -e "s|@TORCH@|${version%/include/torch/headeronly/version.h}|" \
  -e "s|@TORCH_VERSION@|$(torch_number MAJOR).$(torch_number MINOR)|" -e "s|@CUDA_FOLDERS@|$cuda_folders|" \
  install/TesseraConfig.cmake.in >"$prefix/lib/cmake/Tessera/TesseraConfig.cmake"
echo "$prefix: $(wc -l <install/headers.txt) headers, lib/libtessera.so, lib/cmake/Tessera"
