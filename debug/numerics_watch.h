#pragma once
// NumericsWatch: norms and maxima of activations and gradients, and the location of the first NaN or infinity.
//
//   NumericsWatch watch(*model);
//   for (int64_t step = 1; step <= steps; ++step) {
//     loss(model(batch)).backward();
//     if (const auto found = watch.check(step)) {     // before clipping gradients and stepping the optimizer
//       throw Error(to_string(*found));               // "step 7, rank 1: the output of 'block2' has NaN"
//     }
//     optimizer.step();
//   }
//
// It reads the outputs of fully_shard's units, the gradients of these outputs (before they are averaged over ranks),
// and then the shards of the parameters' gradients, in one pass over each. On a GPU, all results are copied to the host
// together.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

enum class WatchedTensor : uint8_t {
  Output,             // of a module
  OutputGradient,     // a NaN or infinity comes from the backward of what follows the module
  ParameterGradient,  // this rank's shard of the average, so the fault may be on another rank
};

/// Statistics of a tensor's local part on this rank, over all calls between two checks.
struct TensorNumbers {
  std::string name;  // module or parameter; "model" for the outermost module
  WatchedTensor kind = WatchedTensor::Output;
  double norm = 0;                               // infinite above 1e19
  std::optional<double> max_abs = std::nullopt;  // NaN if any element is; see Options
};

struct NonFiniteTensor {
  int64_t step = 0;
  int rank = 0;
  std::string name;
  WatchedTensor kind = WatchedTensor::Output;
  bool is_nan = false;  // otherwise infinite
};

std::string to_string(const NonFiniteTensor& found);

/// Watches a model. Thread safety: for the rank's thread.
class NumericsWatch {
 public:
  struct Options {
    bool every_module = false;  // also modules inside units; costs a pass over each output
    bool max_abs = false;  // for all tensors, at the cost of another pass; otherwise only those with a nonfinite norm
  };

  /// Registers the hooks. `model` must outlive the watch. Without units, watches every module with a hook point.
  explicit NumericsWatch(ModuleRef model, Options options);
  explicit NumericsWatch(ModuleRef model) : NumericsWatch(model, Options{}) {}
  ~NumericsWatch();
  NumericsWatch(const NumericsWatch&) = delete;
  NumericsWatch& operator=(const NumericsWatch&) = delete;

  /// Returns the first nonfinite tensor since the last check, equal on all ranks. It is the one computed earliest in
  /// its rank's step; ties go to the lowest rank. Collective over the default group, if there is one.
  std::optional<NonFiniteTensor> check(int64_t step);

  /// Returns the statistics that the last check() read on this rank, in order of computation.
  const std::vector<TensorNumbers>& numbers() const { return numbers_; }

 private:
  struct Readings;
  struct Reading;
  struct Numbers;
  void read_gradients();
  std::optional<NonFiniteTensor> agree(int64_t place, bool is_nan, int64_t step) const;

  ModuleRef model_;
  std::vector<std::string> names_;      // modules, then parameters
  std::shared_ptr<Readings> readings_;  // shared with hooks in graphs that outlive this
  std::vector<TensorNumbers> numbers_;
};

}  // namespace tessera
