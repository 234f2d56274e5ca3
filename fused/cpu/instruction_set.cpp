#include "fused/cpu/instruction_set.h"

#include <ATen/Version.h>

namespace tessera::fused {

InstructionSet instruction_set() {
  const auto name = at::get_cpu_capability();
  return name == "AVX512" ? InstructionSet::Avx512 : name == "AVX2" ? InstructionSet::Avx2 : InstructionSet::Baseline;
}

}  // namespace tessera::fused
