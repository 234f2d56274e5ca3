#include "checkpoint/ranks/rank_sync.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <filesystem>
#include <iterator>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "checkpoint/format/checkpoint_error.h"
#include "comm/all_gather_strings.h"
#include "comm/collectives.h"
#include "comm/context/flight_record.h"

namespace tessera::dcp {

namespace {

/// A rank's message: a letter for the outcome of its step, then the result or the error's text.
constexpr char kResult = 'r';

std::string run_step(const std::function<std::string()>& step) {
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
  } catch (const std::filesystem::filesystem_error& error) {
    return fmt::format("C{}: {}", error.path1().string(), error.code().message());
  } catch (const std::exception& error) {
    return std::string("E") + error.what();
  } catch (...) {
    return "Ean exception that is no std::exception";
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

}  // namespace

RankSync RankSync::all() {
  RankSync ranks;
  if (is_initialized()) {
    ranks.group_ = std::make_shared<const ProcessGroupPtr>(default_group());
    ranks.rank_ = get_rank();
    ranks.size_ = get_world_size();
  }
  return ranks;
}

RankSync RankSync::with_own_group() const {
  RankSync ranks = *this;
  if (size_ > 1) {
    std::vector<int64_t> members(static_cast<size_t>(size_));
    std::iota(members.begin(), members.end(), 0);
    ranks.group_ = std::make_shared<const ProcessGroupPtr>(new_group(members, "checkpoint"));
  }
  return ranks;
}

std::vector<std::string> RankSync::exchange(const std::function<std::string()>& step) const {
  auto own = run_step(step);
  const FlightLabel label("checkpoint");
  auto outcomes = size_ == 1 ? std::vector<std::string>{std::move(own)} : all_gather_strings(*group_, own);
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

void RankSync::on_all_ranks(const std::function<void()>& step) const {
  exchange([&] {
    step();
    return std::string();
  });
}

std::string RankSync::from_rank0(const std::function<std::string()>& step) const {
  std::string text;
  on_rank0([&] { text = step(); });
  std::vector<int64_t> size = {std::ssize(text)};
  broadcast_from_rank0(size);
  text.resize(static_cast<size_t>(size[0]));
  broadcast_from_rank0(at::from_blob(text.data(), {size[0]}, at::kByte));
  return text;
}

void RankSync::on_rank0(const std::function<void()>& step) const {
  on_all_ranks([&] {
    if (rank_ == 0) {
      step();
    }
  });
}

void RankSync::send(const at::Tensor& data, int to) const {
  tessera::send(data, to, *group_);
}

Pending RankSync::send_async(const at::Tensor& data, int to) const {
  return tessera::send_async(data, to, *group_);
}

void RankSync::receive(const at::Tensor& data, int from) const {
  tessera::recv(data, from, *group_);
}

void RankSync::broadcast_from_rank0(std::vector<int64_t>& numbers) const {
  broadcast_from_rank0(at::from_blob(numbers.data(), {std::ssize(numbers)}, at::kLong));
}

void RankSync::broadcast_from_rank0(const at::Tensor& own) const {
  if (size_ == 1 || own.numel() == 0) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const FlightLabel label("checkpoint");
  const auto sent = own.to(has_backend(*group_, at::kCPU) ? at::kCPU : at::kCUDA);
  broadcast(sent, 0, *group_);
  own.copy_(sent);
}

}  // namespace tessera::dcp
