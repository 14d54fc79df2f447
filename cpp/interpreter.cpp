// libetkv's side of interpreter.hpp: implements the classes of that file with
// the classes of the bridge to Rust.
#include "cpp/interpreter.hpp"

#include <cstddef>
#include <type_traits>
#include <utility>

#include "etkv-capi/src/bridge.rs.h"

namespace etkv::interpreter {
namespace {

// The layout that crates/etkv-delegate/src/argument.rs also checks.
static_assert(std::is_trivially_copyable_v<Argument>);
static_assert(sizeof(void*) != 8 || sizeof(Argument) == 48);
static_assert(sizeof(void*) != 8 || offsetof(Argument, shape) == 16);
static_assert(sizeof(void*) != 8 || offsetof(Argument, integer) == 32);
static_assert(sizeof(void*) != 8 || offsetof(Argument, scalar_type) == 40);
static_assert(sizeof(void*) != 8 || offsetof(Argument, is_tensor) == 41);

// The layout of `Task` in crates/etkv-capi/src/bridge.rs: a function, then its
// context.
static_assert(std::is_trivially_copyable_v<Task>);
static_assert(sizeof(Task) == 2 * sizeof(void*));
static_assert(offsetof(Task, context) == sizeof(void*));

template <typename T>
rust::Slice<const T> slice(View<T> view) {
  // An empty slice still needs an address.
  return view.size == 0 ? rust::Slice<const T>()
                        : rust::Slice<const T>(view.data, view.size);
}

/// Converts text from outside. Bytes that are not UTF-8 are replaced, so a name
/// with such bytes is not found.
rust::String text(std::string_view view) {
  return rust::String::lossy(view.data(), view.size());
}

Outcome outcome(const bridge::Outcome& outcome) {
  return {outcome.status, std::string(outcome.message)};
}

class BridgedProgram final : public Program {
 public:
  explicit BridgedProgram(Target target)
      : delegate_(bridge::new_delegate(target == Target::cpu)) {}

  Outcome load(
      View<std::uint8_t> payload,
      Constants& constants,
      std::string_view cache_key,
      std::string_view logits,
      std::string_view passes,
      std::string_view buffers) override {
    return outcome(delegate_->load(
        slice(payload),
        constants,
        text(cache_key),
        text(logits),
        text(passes),
        text(buffers)));
  }

  Outcome execute(
      View<Argument> inputs,
      View<std::int8_t> output_types,
      Host& host,
      const Threads& threads) override {
    return outcome(
        delegate_->execute(slice(inputs), slice(output_types), host, threads));
  }

  std::size_t n_inputs() const override {
    return delegate_->n_inputs();
  }
  std::size_t n_outputs() const override {
    return delegate_->n_outputs();
  }

 private:
  rust::Box<bridge::Delegate> delegate_;
};

class BridgedInterpreter final : public Interpreter {
 public:
  std::unique_ptr<Program> new_program(Target target) const override {
    return std::make_unique<BridgedProgram>(target);
  }
  void report(etkv_status status, std::string_view message) const override {
    bridge::report(status, text(message));
  }
};

} // namespace
} // namespace etkv::interpreter

const etkv::interpreter::Interpreter* etkv_private_interpreter_7() {
  static const etkv::interpreter::BridgedInterpreter interpreter;
  return &interpreter;
}
