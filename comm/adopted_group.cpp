#include "comm/adopted_group.h"

#include <fmt/ranges.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/gloo/gloo_backend.h"
#include "comm/make_group.h"

namespace tessera {

ProcessGroupPtr adopt_group(const c10::intrusive_ptr<c10d::Backend>& backend, const std::vector<int64_t>& ranks,
                            const std::string& name) {
  GroupInfo info = info_of_members("adopt_group", ranks, name);
  info.key = fmt::format("adopted/{}[{}]", name, fmt::join(ranks, ","));
  TESSERA_CHECK(ValueError, backend, "adopt_group(\"{}\"): the backend is undefined", name);
  TESSERA_CHECK(ValueError, backend->getRank() == info.rank && backend->getSize() == info.size(),
                "adopt_group(\"{}\"): the backend is rank {} of {}, but the caller rank {} of {}; give the backend's "
                "ranks in its order",
                name, backend->getRank(), backend->getSize(), info.rank, info.size());
  const c10::intrusive_ptr<GroupBackend> own = adopt_gloo_backend(info, backend);
  TESSERA_CHECK(NotImplementedError, own,
                "adopt_group(\"{}\"): backend \"{}\"; only a c10d::ProcessGroupGloo can be adopted. new_group() makes "
                "connections of its own",
                name, backend->getBackendName());
  constexpr auto kType = c10d::ProcessGroup::BackendType::GLOO;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(info.rank, info.size());
  group->setBackend(c10::DeviceType::CPU, kType, own);
  group->setDefaultBackend(kType);
  group->setGroupName("adopted/" + name);
  return group;
}

}  // namespace tessera
