#include "fully_shard/param/shard_version_check.h"

#include <algorithm>

#include "base/error.h"

namespace tessera {

ShardFault ShardVersionCheck::fault() const {
  const auto is_replaced = [](const ShardedParam& param) { return param.was_replaced(); };
  return std::ranges::any_of(params_.all(), is_replaced) ? ShardFault::Replaced
         : params_.is_on_meta()                          ? ShardFault::OnMeta
                                                         : ShardFault::None;
}

void ShardVersionCheck::check_usable() const {
  const auto params = params_.all();
  for (const auto& param : params) {
    TESSERA_CHECK(
        StateError, !param.was_replaced(),
        "{0}: the data of parameter '{1}' of {2} were replaced after {0} took it (by module.to(), set_data, or a "
        "second unit). Convert or load the module before {0}, or change the values in place",
        api_, param.origin().name, param.origin().module);
    TESSERA_CHECK(StateError, !params_.is_on_meta(),
                  "{}: parameter '{}' of {} is still on the meta device, as are the {} parameters of its "
                  "unit. Call to_empty(model), then initialize the parameters (reset_parameters(model)) or load them",
                  api_, param.origin().name, param.origin().module, params.size());
  }
}

ParamVersions ShardVersionCheck::versions() const {
  const auto params = params_.all();
  ParamVersions versions;
  versions.each.reserve(params.size());
  for (const auto& param : params) {
    versions.each.push_back(param.version());
    versions.sum += versions.each.back();
  }
  return versions;
}

void ShardVersionCheck::check_unchanged_since(const ParamVersions& versions) const {
  if (!has_changed_since(versions)) {
    return;
  }
  const auto params = params_.all();
  for (size_t i = 0; i < params.size(); ++i) {
    TESSERA_CHECK(StateError, params[i].version() == versions.each[i],
                  "{}: parameter '{}' of {} was changed in place between forward and backward, so its "
                  "gradient would be that of other values. Run backward() before optimizer.step(), or forward again "
                  "after it",
                  api_, params[i].origin().name, params[i].origin().module);
  }
}

void ShardVersionCheck::expect_no_writes() {
  for (auto& param : params_.all()) {
    param.expect_no_writes();
  }
}

void ShardVersionCheck::check_not_written() const {
  if (keeps_writes_) {
    return;
  }
  for (const auto& param : params_.all()) {
    TESSERA_CHECK(StateError, !param.was_written(),
                  "{}: forward changed parameter '{}' of {} in place (as max_norm of an embedding does), which {}. "
                  "Change parameters between iterations, or leave the module out of the unit with ignored_params",
                  api_, param.origin().name, param.origin().module,
                  params_.is_alias() ? "the other ranks' copies would not have" : "its shards would lose");
  }
}

std::string ShardVersionCheck::lost_write() const {
  if (params_.is_alias()) {
    return {};
  }
  const auto params = params_.all();
  const auto written = std::ranges::find_if(params, &ShardedParam::was_written);
  if (written == params.end()) {
    return {};
  }
  return fmt::format(
      "{}: parameter '{}' of {} was changed in place while its unit was unsharded, which the shards do not have, so "
      "that the change is lost. Change sharded parameters (after fsdp(module).reshard(): the outermost unit stays "
      "unsharded from its forward to the end of its backward), or full ones inside of summon_full_params",
      api_, written->origin().name, written->origin().module);
}

}  // namespace tessera
