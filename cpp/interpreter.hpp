// The interface through which libetkv's backends for ExecuTorch run programs in
// libetkv.
//
// Private to these libraries, which are built together. The interface is one C
// symbol and virtual calls, so that libetkv exports no symbol of cxx's runtime.
// A host with Rust code may have its own copy of that runtime, and the symbols
// of that copy would replace exported ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "etkv/etkv.h"

namespace etkv::interpreter {

/// A view of elements. The view does not own them.
template <typename T>
struct View {
  const T* data = nullptr;
  std::size_t size = 0;
};

/// The result of a call: ETKV_OK, or a status and a message.
struct Outcome {
  etkv_status status = ETKV_OK;
  std::string message;
};

/// An argument of a program (an input or an output): a contiguous tensor, or an
/// integer. It is passed to Rust as it is: crates/etkv-delegate/src/argument.rs
/// has the same fields.
struct Argument {
  /// The elements of a tensor, row-major.
  const std::uint8_t* data = nullptr;
  std::size_t n_bytes = 0;
  const std::int32_t* shape = nullptr;
  std::size_t rank = 0;
  /// The value of an integer.
  std::int64_t integer = 0;
  /// ExecuTorch's number of a tensor's dtype.
  std::int8_t scalar_type = 0;
  bool is_tensor = false;
};

/// A program's constants, by name.
class Constants {
 public:
  virtual ~Constants() = default;
  /// Finds a constant by a name of `size` bytes, and keeps it mapped until the
  /// next call.
  virtual bool find(const char* name, std::size_t size) = 0;
  /// Return the bytes of the constant that was found last.
  virtual const std::uint8_t* data() const = 0;
  virtual std::size_t size() const = 0;
};

/// The host that runs a program.
class Host {
 public:
  virtual ~Host() = default;
  /// Resizes output `i`, and returns the memory for its `n_bytes` bytes. The
  /// memory stays valid for the run. Returns nullptr if the output cannot have
  /// the shape; `refusal` then returns the reason.
  virtual std::uint8_t* place(
      std::size_t i,
      const std::int32_t* shape,
      std::size_t rank,
      std::size_t n_bytes) = 0;
  /// Sets output `i` to an integer. Returns false if there is no such output.
  virtual bool set_integer(std::size_t i, std::int64_t value) = 0;
  /// Returns the reason that the last output was refused.
  virtual const std::string& refusal() const = 0;
};

/// Work that threads share: `run(context, i)` does part `i` of it.
struct Task {
  void (*run)(const void* context, std::size_t i) = nullptr;
  const void* context = nullptr;
};

/// The threads of the host.
class Threads {
 public:
  virtual ~Threads() = default;
  /// Returns the maximum number of parts that run at the same time.
  virtual std::size_t count() const = 0;
  /// Does each of `n_parts` parts once, in any order. Returns when all are
  /// done.
  virtual void run(std::size_t n_parts, const Task& task) const = 0;
};

/// The programs that an interpreter runs.
enum class Target {
  mlx, ///< of ExecuTorch's MLX delegate: one graph each
  cpu, ///< of etkv's CPU exports: one call each
};

/// One delegate of a loaded method; empty until it is loaded.
class Program {
 public:
  virtual ~Program() = default;
  /// Decodes a payload, copies its constants and binds the cache. If
  /// `cache_key`, `logits` or `passes` is empty, that option is absent.
  virtual Outcome load(
      View<std::uint8_t> payload,
      Constants& constants,
      std::string_view cache_key,
      std::string_view logits,
      std::string_view passes,
      std::string_view buffers) = 0;
  /// Runs the program on its inputs and writes the outputs to the memory that
  /// `host` returns. `output_types` has ExecuTorch's numbers of the outputs'
  /// dtypes.
  virtual Outcome execute(
      View<Argument> inputs,
      View<std::int8_t> output_types,
      Host& host,
      const Threads& threads) = 0;
  /// Return the numbers of inputs and outputs of a loaded program.
  virtual std::size_t n_inputs() const = 0;
  virtual std::size_t n_outputs() const = 0;
};

/// The interpreter of programs, with the process's registry of caches.
class Interpreter {
 public:
  virtual ~Interpreter() = default;
  virtual std::unique_ptr<Program> new_program(Target target) const = 0;
  /// Keeps an error for etkv_delegate_take_error on this thread.
  virtual void report(etkv_status status, std::string_view message) const = 0;
};

} // namespace etkv::interpreter

/// Returns libetkv's interpreter, never null. The result is a pointer, because
/// a function with C linkage cannot return a reference. The number in the
/// function's name is the version of the classes above. Increase it with every
/// change of these classes, so that libraries of two builds do not load
/// together.
extern "C" ETKV_API const etkv::interpreter::Interpreter*
etkv_private_interpreter_7();
