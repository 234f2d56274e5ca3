#pragma once
// Selects the variant of a kernel for this CPU. A kernel's source is compiled for each set of vector instructions.
//
//   const GateKernels& gate_kernels(Baseline), & gate_kernels(Avx2), & gate_kernels(Avx512);   // one a variant
//   for_this_cpu([](auto set) -> const GateKernels& { return gate_kernels(set); });

namespace tessera::fused {

enum class InstructionSet { Baseline, Avx2, Avx512 };

struct Baseline {};
struct Avx2 {};
struct Avx512 {};

#if defined(CPU_CAPABILITY_AVX512)
using ThisSet = Avx512;
#elif defined(CPU_CAPABILITY_AVX2)
using ThisSet = Avx2;
#else
using ThisSet = Baseline;
#endif

/// Returns the instruction set that ATen uses; the variable ATEN_CPU_CAPABILITY limits it.
InstructionSet instruction_set();

/// Returns choose(Baseline()), choose(Avx2()) or choose(Avx512()).
template <class Choose>
decltype(auto) for_this_cpu(Choose choose) {
#ifdef __x86_64__
  static const InstructionSet set = instruction_set();
  if (set == InstructionSet::Avx512) {
    return choose(Avx512());
  }
  if (set == InstructionSet::Avx2) {
    return choose(Avx2());
  }
#endif
  return choose(Baseline());
}

}  // namespace tessera::fused
