#include "checkpoint/format/value.h"

namespace tessera::dcp {

std::string section_name(Section section) {
  switch (section) {
    case Section::Model:
      return "model";
    case Section::Optimizer:
      return "optimizer";
    case Section::User:
      return "user";
  }
  return "";
}

std::string file_key(Section section, const std::string& key) {
  return section == Section::Model ? key : section_name(section) + "." + key;
}

}  // namespace tessera::dcp
