#pragma once
// What a checkpoint holds beside tensors, and the three parts that it has.

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <variant>

namespace tessera::dcp {

/// A number or a text of the user's, or of the optimizer: a step, a learning rate.
using Value = std::variant<int64_t, double, std::string>;
using Values = std::map<std::string, Value>;

/// The parts of a checkpoint. The tensors of each lie in files of their own, so that a tool that reads models finds a
/// model and nothing else.
enum class Section { Model, Optimizer, User };
inline constexpr std::array kSections = {Section::Model, Section::Optimizer, Section::User};

/// "model", "optimizer", "user": how files and messages name it.
std::string section_name(Section section);
/// A key as files and messages have it: the model's own name, or "optimizer.state.in.weight.exp_avg".
std::string file_key(Section section, const std::string& key);

}  // namespace tessera::dcp
