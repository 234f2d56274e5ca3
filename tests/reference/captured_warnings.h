#pragma once
// What the calling thread warns of.
//
//   const CapturedWarnings warnings;
//   model.clip_grad_norm_(1.0);
//   expect_equal(warnings.texts(), std::vector<std::string>{});

#include <c10/util/Exception.h>

#include <string>
#include <variant>
#include <vector>

namespace tessera::testing {

/// While it lives, the thread's warnings are kept here and shown nowhere.
class CapturedWarnings : public c10::WarningHandler {
 public:
  CapturedWarnings() : guard_(this) {}
  void process(const c10::Warning& warning) override {
    const bool is_user = std::holds_alternative<c10::UserWarning>(warning.type());
    texts_.push_back((is_user ? "" : "not a UserWarning: ") + warning.msg());
  }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  std::vector<std::string> texts_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace tessera::testing
