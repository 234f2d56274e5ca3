#pragma once
// What a program has that uses c10d by itself: a gloo backend that this library did not make.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace tessera::testing {

/// Connects `ranks` of the default group, which are processes of run_processes(); each of them calls it, with the same
/// arguments, of which no other call has the same.
c10::intrusive_ptr<c10d::Backend> connect_own_gloo(const std::string& name, const std::vector<int64_t>& ranks,
                                                   int num_devices = 1);

}  // namespace tessera::testing
