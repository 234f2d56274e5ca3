#!/usr/bin/env bash
# stand_ins.sh <torch/lib> <directory> <library>...: shared libraries, by soname, that take the place of CUDA's where
# those are not installed, so that libtorch's own libraries load. Each defines the functions that libtorch looks for in
# it, with their versions; one that is called says what to install and ends the process.
set -euo pipefail
torch_lib=$1 out=$2
shift 2

package_of() {
  case $1 in
    cudnn | cusparselt | nccl | nvshmem) echo "nvidia-$1-cu13" ;;
    nvrtc) echo nvidia-cuda-nvrtc ;;
    *) echo "nvidia-$1" ;;
  esac
}

# A function for each name on stdin.
source_of() {
  cat <<EOF
#include <stdio.h>
#include <stdlib.h>
static void missing(const char* name) {
  fprintf(stderr, "%s was called, but $library was not installed when this was built: what is loaded only lets programs "
          "start. Install the pip package $package, or NVIDIA's library, and let Bazel look again: "
          "./bazelw sync --only=cuda\n", name);
  abort();
}
EOF
  sed 's/@.*//' | sort -u | sed 's/.*/void &(void) { missing("&"); }/'
}

# "VERSION { name; ... };" for names on stdin that have one.
versions_of() {
  awk -F@ 'NF > 1 { names[$NF] = names[$NF] " " $1 ";" }
    END { for (version in names) printf "%s {%s };\n", version, names[version] }'
}

mkdir -p "$out"
looked_for=$(nm -D --with-symbol-versions --undefined-only "$torch_lib"/*.so | awk 'NF > 1 { print $NF }' | sort -u)
for library in "$@"; do
  prefix=${library%%.so*} prefix=${prefix#lib} prefix=${prefix%_host} prefix=${prefix,,}
  package=$(package_of "$prefix")
  names=$(grep -iE "^$prefix" <<<"$looked_for" || true)
  source_of <<<"$names" >"$out/$library.c"
  versions_of <<<"$names" >"$out/$library.versions"
  script=()
  [[ -s $out/$library.versions ]] && script=("-Wl,--version-script=$out/$library.versions")
  "${CC:-gcc}" -shared -fPIC -O1 -w "-Wl,-soname,$library" "${script[@]}" "$out/$library.c" -o "$out/$library"
done
