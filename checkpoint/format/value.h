#pragma once
// Values other than tensors, and the sections of a checkpoint.

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <variant>

namespace tessera::dcp {

using Value = std::variant<int64_t, double, std::string>;  // such as a step or a learning rate
using Values = std::map<std::string, Value>;

/// Section of a checkpoint. Each has separate files, so that a tool that reads models finds nothing else.
enum class Section { Model, Optimizer, User };
inline constexpr std::array kSections = {Section::Model, Section::Optimizer, Section::User};

std::string section_name(Section section);  // "model", "optimizer" or "user"
/// Returns a key as in files and messages: "in.weight" for a model, or "optimizer.state.in.weight.exp_avg".
std::string file_key(Section section, const std::string& key);

}  // namespace tessera::dcp
