// A backend between ExecuTorch and MLXBackend. With it a test passes arguments
// to the delegate that ExecuTorch would refuse.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fixture.hpp"

namespace etkv::tests {

/// Changes the delegate's arguments: inputs, then outputs.
using Tamper = std::function<void(std::vector<EValue*>&)>;

/// A tamper: the delegate gets a number in place of the tensor for the logits,
/// so the step fails after its rows were written.
void no_output(std::vector<EValue*>& arguments);

/// Registers the tap once, before the first program.
void open_tap();

/// A program whose delegate is called through the tap, with its cache.
class Tapped {
 public:
  explicit Tapped(
      int32_t capacity = 64,
      const Change& change = nullptr,
      const std::string& kind = Cache::kKind);
  ~Tapped();

  Result<Rows> step(Ids ids, int64_t position, Tamper tamper = nullptr);
  Result<Rows> step(Ids ids, Ids positions, Tamper tamper);

  Rows at(int64_t position, const Ids& ids);
  Cache& cache() {
    return session_->cache();
  }
  const char* key() const {
    return session_->key();
  }

 private:
  std::string program_;
  Module module_;
  std::unique_ptr<Session> session_;
};

} // namespace etkv::tests
