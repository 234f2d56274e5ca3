#pragma once
// NumericsWatch: norms and largest elements of activations and gradients, and where the first NaN or infinity is.
//
//   NumericsWatch watch(*model);
//   for (int64_t step = 1; step <= steps; ++step) {
//     loss(model(batch)).backward();
//     if (const auto found = watch.check(step)) {     // before gradients are clipped, and the optimizer steps
//       throw Error(to_string(*found));               // "step 7, rank 1: the output of 'block2' has NaN"
//     }
//     optimizer.step();
//   }
//
// It reads the outputs of fully_shard's units and the gradients of these outputs, which a rank has before they are
// averaged over all, and then the shards of the parameters' gradients: a pass over each. Numbers of a GPU come to the
// host together.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

enum class WatchedTensor : uint8_t {
  Output,             // of a module
  OutputGradient,     // NaN or infinity comes from the backward of what follows the module
  ParameterGradient,  // the rank's shard: an average, so that the fault may be another rank's
};

/// A tensor's local part on this rank; of several calls between two checks, all together.
struct TensorNumbers {
  std::string name;  // of the module or parameter, "model" for the outermost module
  WatchedTensor kind = WatchedTensor::Output;
  double norm = 0;                               // infinite above 1e19
  std::optional<double> max_abs = std::nullopt;  // NaN if an element is; see Options
};

struct NonFiniteTensor {
  int64_t step = 0;
  int rank = 0;
  std::string name;
  WatchedTensor kind = WatchedTensor::Output;
  bool is_nan = false;  // or infinite
};

std::string to_string(const NonFiniteTensor& found);

/// Thread safety: for the rank's thread.
class NumericsWatch {
 public:
  struct Options {
    bool every_module = false;  // those in units too, which costs a pass over each output
    bool max_abs = false;       // of all tensors, which costs another pass; else of those whose norm is not finite
  };

  /// `model` must outlive the watch. Of a model without units, it watches every module with a hook point.
  explicit NumericsWatch(ModuleRef model, Options options);
  explicit NumericsWatch(ModuleRef model) : NumericsWatch(model, Options{}) {}
  ~NumericsWatch();
  NumericsWatch(const NumericsWatch&) = delete;
  NumericsWatch& operator=(const NumericsWatch&) = delete;

  /// Returns the first that is not finite since the last check, the same on all ranks: what a rank computed earliest in
  /// its step, of equals that of the lowest rank. Collective over the default group, if there is one.
  std::optional<NonFiniteTensor> check(int64_t step);

  /// Returns what the last check() read on this rank, in the order in which it was computed.
  const std::vector<TensorNumbers>& numbers() const { return numbers_; }

 private:
  struct Readings;
  struct Reading;
  struct Numbers;
  void read_gradients();
  std::optional<NonFiniteTensor> agree(int64_t place, bool is_nan, int64_t step) const;

  ModuleRef model_;
  std::vector<std::string> names_;      // of modules, then of parameters
  std::shared_ptr<Readings> readings_;  // which hooks of graphs that live on have too
  std::vector<TensorNumbers> numbers_;
};

}  // namespace tessera
