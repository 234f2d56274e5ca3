#include "checkpoint/ranks.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/manifest.h"
#include "comm/collectives.h"

namespace tessera::dcp {

namespace {

/// What a rank has to say: a letter for how its step ended, then the result or the error's text.
constexpr char kResult = 'r';

std::string outcome_of(const std::function<std::string()>& step) {
  try {
    return kResult + step();
  } catch (const CommError&) {
    throw;
  } catch (const ValueError& error) {
    return std::string("V") + error.what();
  } catch (const KeyError& error) {
    return std::string("K") + error.what();
  } catch (const NotImplementedError& error) {
    return std::string("N") + error.what();
  } catch (const StateError& error) {
    return std::string("S") + error.what();
  } catch (const CheckpointError& error) {
    return std::string("C") + error.what();
  } catch (const c10::Error& error) {
    return std::string("E") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("E") + error.what();
  }
}

[[noreturn]] void throw_as(char kind, const std::string& text) {
  switch (kind) {
    case 'V':
      throw ValueError(text);
    case 'K':
      throw KeyError(text);
    case 'N':
      throw NotImplementedError(text);
    case 'S':
      throw StateError(text);
    case 'C':
      throw CheckpointError(text);
    default:
      throw Error(text);
  }
}

/// `own` of all ranks, one row a rank, on the CPU.
at::Tensor gather_rows(const at::Tensor& own, int ranks, const ProcessGroupPtr& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto devices = group->getDeviceTypes();
  const auto is_cpu = [](const at::Device& device) { return device.is_cpu(); };
  const bool has_cpu = std::any_of(devices.begin(), devices.end(), is_cpu);
  const auto input = own.to(has_cpu ? at::kCPU : at::kCUDA);
  const auto all = at::empty({ranks, own.numel()}, input.options());
  all_gather(all, input, group);
  return all.to(at::kCPU);
}

}  // namespace

Ranks Ranks::all() {
  Ranks ranks;
  if (is_initialized()) {
    ranks.group_ = std::make_shared<const ProcessGroupPtr>(default_group());
    ranks.rank_ = get_rank();
    ranks.size_ = get_world_size();
  }
  return ranks;
}

Ranks Ranks::with_own_group() const {
  Ranks ranks = *this;
  if (size_ > 1) {
    std::vector<int64_t> members(static_cast<size_t>(size_));
    std::iota(members.begin(), members.end(), 0);
    ranks.group_ = std::make_shared<const ProcessGroupPtr>(new_group(members, "checkpoint"));
  }
  return ranks;
}

std::vector<std::string> Ranks::gather(const std::string& text) const {
  if (size_ == 1) {
    return {text};
  }
  const auto own = at::empty({2}, at::kLong);
  own.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(text.size());
  own.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(hash_bytes(text.data(), text.size()));
  const auto all = gather_rows(own, size_, *group_);
  const auto* sizes = all.const_data_ptr<int64_t>();
  int64_t longest = 1;
  bool equal = true;
  for (int rank = 0; rank < size_; ++rank) {
    longest = std::max(longest, sizes[2 * rank]);
    equal = equal && sizes[2 * rank] == sizes[0] && sizes[2 * rank + 1] == sizes[1];
  }
  if (equal) {
    return std::vector<std::string>(static_cast<size_t>(size_), text);
  }
  const auto bytes = at::empty({longest}, at::kByte);
  std::memset(bytes.mutable_data_ptr(), 0, static_cast<size_t>(longest));
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  const auto texts = gather_rows(bytes, size_, *group_);
  std::vector<std::string> result;
  for (int rank = 0; rank < size_; ++rank) {
    result.emplace_back(static_cast<const char*>(texts.const_data_ptr()) + rank * longest,
                        static_cast<size_t>(sizes[2 * rank]));
  }
  return result;
}

std::vector<std::string> Ranks::exchange(const std::function<std::string()>& step) const {
  auto outcomes = gather(outcome_of(step));
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank][0] != kResult) {
      const auto text = outcomes[rank].substr(1);
      throw_as(outcomes[rank][0], size_ == 1 ? text : fmt::format("{} (met by rank {})", text, rank));
    }
  }
  for (auto& outcome : outcomes) {
    outcome.erase(0, 1);
  }
  return outcomes;
}

std::string Ranks::from_first(const std::function<std::string()>& step) const {
  return exchange([&] { return rank_ == 0 ? step() : std::string(); })[0];
}

}  // namespace tessera::dcp
