#!/usr/bin/env bash
# cuda_stand_ins.sh <torch/lib> <directory>: libraries that let Python import the torch wheel where CUDA is not
# installed. The wheel's libraries name 3 GB of CUDA libraries that nothing calls on a CPU; the ones made here define
# each name that is looked for, with its version, and contain nothing. The process dies if one is called.
set -euo pipefail
torch_lib=$1 out=$2
libraries=(libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcufile.so.0 libcusolver.so.12
  libcusparse.so.12 libcusparseLt.so.0 libnccl.so.2 libnvrtc.so.13 libnvshmem_host.so.3)
prefixes='nvshmem|cudnn|cublas|cusparse|cusolver|cufft|nvrtc|nccl|cuFile'

mkdir -p "$out"
names=$out/names   # "name" or "name@version"
nm -D --with-symbol-versions --undefined-only "$torch_lib"/*.so | awk '{ print $NF }' | grep -E "^($prefixes)" | sort -u >"$names"
sed 's/@.*//' "$names" | sort -u | sed 's/.*/char &[64];/' >"$out/names.c"
awk -F@ 'NF > 1 { names[$NF] = names[$NF] " " $1 ";" }
  END { for (version in names) printf "%s {%s };\n", version, names[version] }' "$names" >"$out/versions"
for library in "${libraries[@]}"; do
  "${CC:-gcc}" -shared -fPIC -nostdlib -w "-Wl,-soname,$library" "-Wl,--version-script=$out/versions" "$out/names.c" -o "$out/$library"
done
